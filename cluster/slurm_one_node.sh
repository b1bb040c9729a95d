#!/usr/bin/env bash
# A Slurm of one node on this machine, for as long as a command runs:
#
#   cluster/slurm_one_node.sh srun -n 2 python -m experiments.train --distributed --mesh dp=2
#   cluster/slurm_one_node.sh sbatch --wait cluster/train.sbatch
#
# As root, with Debian's packages slurm-wlm and munge. It keeps its files in a temporary folder (or $SLURM_LAB, which
# stays), needs no systemd and no control groups, and offers two CPUs whether or not there are two.
set -euo pipefail
(($# > 0)) || { echo "usage: $0 COMMAND..., as in $0 srun -n 2 hostname" >&2; exit 2; }
[[ $(id -u) == 0 ]] || { echo "$0: slurmd starts jobs as any user, so it must run as root" >&2; exit 2; }
for program in munged slurmctld slurmd; do
    command -v "$program" >/dev/null || { echo "$0: there is no $program. apt-get install slurm-wlm munge" >&2; exit 2; }
done

lab=${SLURM_LAB:-$(mktemp -d)}
mkdir -p "$lab/state" "$lab/spool"
export SLURM_CONF=$lab/slurm.conf

stop() {
    scancel --user=root --quiet 2>/dev/null || true
    for daemon in slurmd slurmctld munged; do
        [[ ! -s $lab/$daemon.pid ]] || kill "$(cat "$lab/$daemon.pid")" 2>/dev/null || true
    done
    [[ -n ${SLURM_LAB:-} ]] || rm -rf "$lab"
}
trap stop EXIT

# ---- configuration ----
# The node is called localhost, since JAX meets at the name of the first node and this machine's own may not resolve.
cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$(hostname -s)(127.0.0.1)
NodeName=localhost NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
SlurmUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits.
AuthInfo=socket=$lab/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd.pid
SlurmctldLogFile=$lab/slurmctld.log
SlurmdLogFile=$lab/slurmd.log
CONF

# ---- the daemons ----
[[ -s $lab/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$lab/munge.key")
munged --force --key-file="$lab/munge.key" --socket="$lab/munge.socket" --pid-file="$lab/munged.pid" \
    --log-file="$lab/munged.log" --seed-file="$lab/munge.seed" 2>>"$lab/munged.err"
slurmctld
slurmd -N localhost
for _ in {1..60}; do
    [[ $(sinfo --noheader --format=%t 2>/dev/null) == idle ]] && break
    sleep 0.5
done
[[ $(sinfo --noheader --format=%t) == idle ]] || { sinfo >&2; tail -n 20 "$lab"/*.log >&2; exit 1; }

"$@"
