#!/bin/bash
# Train on several machines of a SLURM cluster, one task per GPU:
#
#     sbatch scripts/examples/slurm.sh shards/photos runs/photos --batch-size 1024 --lanes 16
#
# srun's variables tell each task its rank; torchrun is not needed. Two minutes before the time limit
# the tasks get SIGTERM and write a checkpoint. The job is queued again and resumes from it.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

shards=${1:?shards, such as shards/photos}
out=${2:?folder of the run, which all machines share}
shift 2

# srun does not take --cpus-per-task from the batch script
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    "${PYTHON:-.venv/bin/python}" -m wdstrain train "$shards" --out "$out" --resume "$@"
status=$?

if [ "$status" -eq 143 ]; then # SIGTERM: a checkpoint was written
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
