# Stands for a training: takes a rate, leaves a result.
echo "training with rate $1"
echo "loss at $1" > "rate-$1.txt"
