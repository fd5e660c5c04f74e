# One rank: the program above, its output in ranks/<rank>.log, its end in ranks/<rank>.exit as
# "<exit code> <exit|signal> <epoch ms>". torchrun answers 1 whatever happened; this is where the truth is kept.

ranks=$GPU_FLOWS_JOB_DIR/ranks
# Without torchrun a node has one process; it is called by the first rank that the node would have.
rank=${RANK:-$((GPU_FLOWS_NODE_RANK * GPU_FLOWS_NPROC_PER_NODE))}

# Room for the record is taken now: a full disk is one of the ways to end.
printf '%-63s\n' '' >"$ranks/.$rank.exit"
# Signals reach the program itself, which is in this process group; the record has to survive them.
trap : TERM INT HUP QUIT

cd -- "$GPU_FLOWS_ROOT" || exit
export PYTHONPATH="$GPU_FLOWS_PYTHONPATH"
$GPU_FLOWS_TIE "$@" >>"$ranks/$rank.log" 2>&1 </dev/null
code=$?

now=$(date +%s%3N)
case $now in *[!0-9]*) now=$(date +%s)000 ;; esac # busybox knows no %N
# A shell reports signal n as 128 + n.
if [ "$code" -gt 128 ] && [ "$code" -le 192 ]; then why=signal; else why=exit; fi
printf '%-63s\n' "$code $why $now" 1<>"$ranks/.$rank.exit"
mv "$ranks/.$rank.exit" "$ranks/$rank.exit"
exit "$code"
