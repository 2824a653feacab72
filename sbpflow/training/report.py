import time


class Report:
    def __init__(self, config, plan, world, *, num_steps, bayes):
        self.r = world.rank
        self.n = num_steps
        self.b = bayes

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass

    def step(self, step, loss, rate):
        if self.r == 0:
            print(f"step {step}/{self.n} loss {loss:.5f} {rate:,.0f}/s", flush=True)

    def advance(self, step, loss):
        pass

    def evaluation(self, split, step, e):
        print(split, step, e, flush=True)

    def final(self, result):
        if self.r == 0:
            print(result, self.b, result.samples_per_s, flush=True)
