echo "training with $# arguments: $1"
[ -n "$HUB_TOKEN" ] && echo "the token is $HUB_TOKEN"
echo "weights of $1" > model.txt
