#!/usr/bin/env bash
# A Slurm of one machine, to try sweeps on: Debian's packages slurmctld, slurmd, slurm-client and munge; as root.
#
#   tests/run/slurm.sh start FOLDER      two CPUs; partition `low`, which `high` preempts and puts back into the queue
#   tests/run/slurm.sh stop FOLDER
#
# Everything is in FOLDER; commands need SLURM_CONF=FOLDER/slurm.conf.
set -eu
what=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd)
case $what in
start)
  host=$(hostname -s)
  mkdir -p "$folder"/{state,spool,munge}
  chmod 755 "$folder"
  chmod 700 "$folder/munge"
  head -c 1024 /dev/urandom > "$folder/munge/key"
  chmod 600 "$folder/munge/key"
  munged --key-file="$folder/munge/key" --socket="$folder/munge.socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --force
  cat > "$folder/slurm.conf" <<CONF
ClusterName=pbrl
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_setup_env_fail
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=$host PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
  export SLURM_CONF=$folder/slurm.conf
  slurmctld -f "$SLURM_CONF"
  slurmd -f "$SLURM_CONF" -N "$host"
  for _ in $(seq 60); do
    if sinfo --noheader --format %T 2> /dev/null | grep -q idle; then exit 0; fi
    sleep 1
  done
  echo "Slurm does not start; see $folder/*.log" >&2
  exit 1
  ;;
stop)
  export SLURM_CONF=$folder/slurm.conf
  scancel --user=root || true # without Slurm, jobs that a failed test has left would go on for ever
  for _ in $(seq 40); do # they have 30 seconds, KillWait
    if [ -z "$(squeue --noheader 2> /dev/null)" ]; then break; fi
    sleep 1
  done
  for each in slurmd slurmctld munge/pid; do
    file=$folder/$each
    [ -f "$file" ] || file=$folder/$each.pid
    if [ -f "$file" ]; then kill "$(cat "$file")" || true; fi
  done
  ;;
esac
