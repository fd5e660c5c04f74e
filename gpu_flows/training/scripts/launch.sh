# The launch on one node; the lines above say of what. Every rank runs rank.sh.

job=$GPU_FLOWS_JOB_DIR

not_ready() {
  echo "gpu-flows: $1" >&2
  printf '1 exit %s000 0\n' "$(date +%s)" >"$job/setup.exit"
  exit 1
}

. "$job/interpreter.sh"
cd -- "$root" || not_ready "the code is not at $root"
root=$(pwd)
[ -n "$python" ] || not_ready "there is no Python on this box"

# What a box presets for ranks of its own (RunPod: WORLD_SIZE, NODE_RANK) or for torchrun (PET_...) is not meant here.
unset $foreign
for name in $(env | sed -n 's/^\(PET_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done

# The cores that this box may use, shared by its processes; torchrun would give each process one.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
  if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
    [ $((quota / period)) -ge "$cores" ] || cores=$((quota / period))
  fi
  OMP_NUM_THREADS=$((cores / nproc))
  [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
fi

# The script's own code comes first; gpu_flows.distributed rides along for a box where gpu-flows is not installed.
# Launchers run elsewhere and without this path: a file of the user's called queue.py is none of their business.
path=$root:$root/src${PYTHONPATH:+:$PYTHONPATH}
(PYTHONPATH=$path && export PYTHONPATH && has gpu_flows.distributed) || path=$path:$job/python

export OMP_NUM_THREADS
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
export MPLBACKEND="${MPLBACKEND:-Agg}" # plt.show() returns instead of waiting for a window
export GPU_FLOWS_NODES="$nodes" GPU_FLOWS_NODE_RANK="$node" GPU_FLOWS_NPROC_PER_NODE="$nproc"
export GPU_FLOWS_ROOT="$root" GPU_FLOWS_PYTHON="$python" GPU_FLOWS_PYTHONPATH="$path"

if [ "$nodes" -eq 1 ]; then
  interface=${interface:-lo} # gloo asks the resolver for its own host name otherwise, and some boxes know none
else
  [ -n "$interface" ] || interface=$("$python" "$job/network.py" interface "$master_addr") ||
    not_ready "no network interface of this box leads to $master_addr"
  export GPU_FLOWS_MASTER_ADDR="$master_addr" GPU_FLOWS_MASTER_PORT="$master_port"
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
fi
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"

mkdir -p "$job/ranks"
# torchrun gives every rank a session of its own and dies without a word to them when it is killed: the tie is ours.
GPU_FLOWS_TIE=''
if setpriv --pdeathsig KILL true 2>/dev/null; then GPU_FLOWS_TIE='setpriv --pdeathsig KILL'; fi # not busybox' own
export GPU_FLOWS_TIE

cd -- "$job" || exit
echo "gpu-flows: node $node of $nodes, $summary" >&2
[ "$launcher" = torchrun ] || exec sh rank.sh

has torch || not_ready "$python has no torch: name an image that has it, or install it in setup"
if [ "$nodes" -eq 1 ]; then
  set -- --standalone
else
  set -- --node-rank "$node" --master-addr "$master_addr" --master-port "$master_port" \
    --rdzv-backend static --rdzv-conf "timeout=$rendezvous_timeout_s"
fi
exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$nproc" "$@" \
  --max-restarts 0 --log-dir "$job/torchrun" --no-python -- $GPU_FLOWS_TIE sh "$job/rank.sh"
