"""What holds for every test."""

from __future__ import annotations

import signal

# A shell starts what runs in its background with SIGINT ignored, and nohup does so with SIGHUP; programs inherit that,
# and neither the tests of interruptions nor the processes that tests start would be what they are for a user.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
