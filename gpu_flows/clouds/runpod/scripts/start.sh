# What the container goes on with after the boot script, in place of its image's own command. POSIX sh.
#
# It never ends: a container whose command ends is started again, and a dead-man that is always begun anew never
# comes to its end.
if [ -x /start.sh ]; then
  /start.sh # RunPod's images: sshd with PUBLIC_KEY, and what else they are known for
else
  sshd=$(PATH=$PATH:/usr/sbin command -v sshd) || {
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openssh-server
    sshd=/usr/sbin/sshd
  }
  mkdir -p ~/.ssh /run/sshd
  chmod 700 ~/.ssh
  grep -qxF "$PUBLIC_KEY" ~/.ssh/authorized_keys || echo "$PUBLIC_KEY" >>~/.ssh/authorized_keys
  chmod 600 ~/.ssh/authorized_keys
  ssh-keygen -A
  "$sshd" -D -e
fi
while :; do sleep 3600; done
