"""Tests that the GPU results and decisions quote the records of the benchmarks."""

from statistics import median
from typing import Any

from tests.repo.test_results_pages import PAGES, ROOT, read, rows


def of_benchmark(record: str, benchmark: str) -> list[dict[str, Any]]:
    return [line for line in read(record) if line["benchmark"] == benchmark]


def test_the_gpu_page_has_the_recorded_values():
    expected = []
    for line in read("gpu_torchrec.jsonl"):
        low, *_, high = ratios = sorted(line["ratios"])
        times = [f"{line[f'{name}_ms']:.1f}" for name in ("plain", "pipelined", "sbpflow")]
        ratio = f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"
        graph = "yes" if line["cuda_graph"] else "no"
        expected.append([line["precision"], graph, *times, ratio])
    assert rows("gpu", "gpu_torchrec.jsonl") == expected
    differences = [
        line.get("largest_difference_of_losses", 0) for line in read("gpu_torchrec.jsonl")
    ]
    assert 0 < max(differences) < 2.2e-6
    passed = {line["part"] for line in read("gpu.jsonl") if line["passed"]}
    assert passed >= {"gpu tests", "nccl tests"}
    sweep = [line for line in read("gpu_dlperf.jsonl") if not line.get("cuda_graph", True)]
    assert rows("gpu", "gpu_dlperf.jsonl") == [
        [
            f"{line['rows'] / 1e6:.1f}",
            f"{line['step_ms']:.1f}",
            f"{line['peak_memory_bytes'] / 1e9:.1f}",
        ]
        for line in sweep
    ]
    assert rows("gpu", "gpu_demo.jsonl") == [
        [f"`{line['settings']}`", f"{line['auc']:.6f}", f"{line['samples_per_s']:,.0f}"]
        for line in read("gpu_demo.jsonl")
    ]
    tables = {line["tables"]: line for line in of_benchmark("gpu_tables.jsonl", "tables")}
    cached = [line for name, line in tables.items() if name.startswith("torchrec cached")]
    tables["torchrec cached"] = min(cached, key=lambda line: line["step_ms"])
    names = ("device", "torchrec device", "cached", "torchrec cached", "small", "growing")
    assert [cells[1:] for cells in rows("gpu", "gpu_tables.jsonl")] == [
        [
            f"{line['rows'] / 1e6:.1f}",
            f"{line['step_ms']:.1f} ({line['min_step_ms']:.1f} to {line['max_step_ms']:.1f})",
            f"{line['peak_memory_bytes'] / 1e9:.1f}",
        ]
        for line in (tables[name] for name in names)
    ]
    assert f"{tables['cached']['fetched'] / 1e3:.0f} thousand rows" in PAGES["gpu"]
    kernels = {(line["rule"], line["kernel"]): line for line in read("gpu_kernels.jsonl")}
    for rule, *cells in rows("gpu", "gpu_kernels.jsonl"):
        names = [(rule, kernel) for kernel in ("torch", "fbgemm", "triton")]
        assert cells == [
            f"{kernels[name][what]:.2f}" if name in kernels else ""
            for what in ("lookup_ms", "update_and_sort_ms")
            for name in names
        ]
    for line in read("gpu_mlp.jsonl"):
        assert f"{line['ms']:.1f} ms in" in PAGES["gpu"].replace("\n", " ")


def test_the_gpu_decisions_quote_the_recorded_kernels():
    page = " ".join((ROOT / "docs" / "decisions" / "gpu.md").read_text().split())
    before, after = read("gpu_trace.jsonl")
    assert f"of {before['device_ms_per_step']:.1f} ms of device work" in page
    assert f"a step has {after['device_ms_per_step']:.1f} ms of device work" in page

    def of(line: dict[str, Any], *words: str) -> tuple[float, float]:
        found = [k for k in line["longest"] if any(word in k["name"] for word in words)]
        return sum(k["ms"] for k in found), sum(k["launches"] for k in found)

    scans, _ = of(before, "scan_innermost_dim_with_indices")
    assert f"took {scans:.1f} ms" in page
    old, launches = of(before, "drop")
    assert f"({1e3 * old / launches:.0f} instead of 45 us per layer)" in page
    # of the elementwise kernels, ReLU's are its forward and its backward pass
    relu, _ = of(before, "launch_clamp", "BinaryFunctor")
    assert f"Both took {old + relu:.1f} ms of a step" in page
    both, _ = of(after, "drop")
    assert f"now take {both:.2f} ms" in page
    new, launches = next((k["ms"], k["launches"]) for k in after["longest"] if k["name"] == "drop")
    assert f"takes {1e3 * new / launches:.0f} us" in page
    first, second = of_benchmark("gpu_tables.jsonl", "tables_before")
    now = next(
        line for line in of_benchmark("gpu_tables.jsonl", "tables") if line["tables"] == "cached"
    )
    assert f"a step took {first['step_ms']:.1f} ms; afterwards, it took" in page
    assert f"it took {second['step_ms']:.1f} ms, nearly all" in page
    assert f"A step takes {now['step_ms']:.1f} ms with 8 lanes" in page
    products, _ = of(after, "gemm", "gemv")
    assert f"{products:.1f} ms of it matrix products" in page
