#!/bin/bash
# Train on Slurm: sbatch --nodes 2 examples/launchers/slurm.sh --config my.yaml key=value ...
# Submit from the checkout. The checkout, data.path, run.dir, and checkpoint.dir must be on a disk that
# all nodes share. docs/launchers.md explains this file.
#SBATCH --job-name=sbpflow
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# 120 s before the time limit, the ranks get SIGTERM, save, and exit, and the job is queued again.
#SBATCH --signal=TERM@120
# For your cluster, add options such as --partition, --gpus-per-node, --cpus-per-task, and --mem.

set -uo pipefail
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
# A job that fails within this many seconds is not queued again, because its command is probably wrong.
short_s=${SHORT_S:-60}
max_restarts=${MAX_RESTARTS:-100}
cpus=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > ranks_per_node ? cpus / ranks_per_node : 1))}
PYTHON=${PYTHON:-.venv/bin/python}
PROGRAM=${PROGRAM:-train_wdl.py}  # or "-m sbpflow doctor", to check the nodes
export PYTHON PROGRAM ranks_per_node
export nodes=$SLURM_JOB_NUM_NODES
export port=$((20000 + SLURM_JOB_ID % 10000))
export launch=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}

# Print the address at which Slurm reaches a node. The script passes addresses instead of names, because
# on a node, the node's own name may resolve to localhost.
address_of() {
    scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
}
export -f address_of
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
main=$(address_of "$first")
export main
echo "job $launch: $nodes nodes ($SLURM_JOB_NODELIST), $ranks_per_node ranks on each, first node $main"

# After one node has ended, the other nodes have 120 s to report their errors and end.
srun --wait=120 --kill-on-bad-exit=0 bash -c '
    exec "$PYTHON" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks_per_node" \
        --rdzv-backend c10d --rdzv-id "$launch" --rdzv-endpoint "$main:$port" \
        --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "$(address_of "$SLURMD_NODENAME")" \
        $PROGRAM "$@"' bash "$@"
code=$?

if ((code == 0)); then
    exit 0
fi
if ((SECONDS < short_s || ${SLURM_RESTART_COUNT:-0} >= max_restarts)); then
    echo "job $launch: ended with code $code after $SECONDS s; not queued again"
    exit "$code"
fi
echo "job $launch: ended with code $code after $SECONDS s; queued again"
scontrol requeue "$SLURM_JOB_ID"
