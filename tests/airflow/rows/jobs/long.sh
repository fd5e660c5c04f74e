# Runs until it is ended, and says so twice a second.
i=0
while [ $i -lt 1200 ]; do
  echo "tick $i"
  i=$((i + 1))
  sleep 0.5
done
