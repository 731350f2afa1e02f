#!/bin/bash
# A job over several hosts under Slurm, which resumes from its last checkpoint after a failure:
#     sbatch examples/slurm.sh --stage 2 --steps 100000
# Slurm starts one torchrun on each host. torchrun starts the ranks, and restarts them if one fails. If a host fails,
# the job returns to the queue, at most three times. Arguments are passed to train_gpt.py.
#SBATCH --job-name=ringcomm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
ranks=${RANKS_PER_HOST:-2}
folder=${CHECKPOINTS:-$PWD/run-$SLURM_JOB_ID} # all hosts must see it; a job that is queued again keeps its ID
restarts=${SLURM_RESTART_COUNT:-0}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # the ranks get a new store in every round
# export GLOO_SOCKET_IFNAME=ib0             # if hosts have several interfaces

if ! srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id "$SLURM_JOB_ID.$restarts" \
  examples/train_gpt.py --save "$folder" --save-every 100 "$@"; then
  [ "$restarts" -lt 3 ] || exit 1
  scontrol requeue "$SLURM_JOB_ID"
fi
