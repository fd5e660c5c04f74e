"""RunPod: pods on secure and community hosts, by REST v2.

=============  ==================================================================
``cloud.py``   the adapter
``prices.py``  what the catalog lists, as offers
``pods.py``    what is asked of a pod, and what its answers mean
``boot.py``    what a pod runs: the dead-man, then what its image would have run
=============  ==================================================================
"""

from __future__ import annotations

from gpu_flows.clouds.runpod.cloud import RunpodCloud

__all__ = ["RunpodCloud"]
