# 300,000 bytes at the very end, the last of them right before the exit.
i=0
while [ $i -lt 3000 ]; do
  printf 'line %05d %s\n' $i ........................................................................................
  i=$((i + 1))
done
echo weights > model.txt
echo "the last line"
