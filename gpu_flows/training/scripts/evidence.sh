# What a job left. Usage: evidence.sh JOB TAIL_BYTES. Items are a header, their bytes in base64, and a line ".":
#
#   setup <number of commands>    setup.exit
#   rank <rank>                   <rank>.exit
#   tail <rank>                   the end of its log, unless it ended well
#   log                           the end of the node's log

cd "$HOME/.gpu-flows/jobs/$1" || exit

give() {
  echo "$1"
  base64
  echo .
}

commands=0
[ ! -e setup.sh ] || commands=$(sed -n 's/^gf_total=//p' setup.sh)
cat setup.exit 2>/dev/null | give "setup $commands"

for log in ranks/*.log; do
  [ -e "$log" ] || continue
  rank=${log#ranks/}
  rank=${rank%.log}
  cat "ranks/$rank.exit" 2>/dev/null | give "rank $rank"
  code=''
  { read -r code _ <"ranks/$rank.exit"; } 2>/dev/null
  [ "$code" = 0 ] || tail -c "$2" "$log" | give "tail $rank"
done

tail -c "$2" log | give log
