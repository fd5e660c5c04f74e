# Thirty seconds of log.
i=0
while [ $i -lt 60 ]; do
  echo "tick $i"
  i=$((i + 1))
  sleep 0.5
done
