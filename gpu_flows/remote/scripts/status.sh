# Describe one job, or all. Usage: status.sh [ID]

if [ $# -gt 0 ]; then
  describe "$1"
else
  for folder in "$jobs"/*/.state; do
    [ -d "$folder" ] || continue
    folder=${folder%/.state}
    describe "${folder##*/}"
  done
fi
