"""Files to a box and back."""

from __future__ import annotations

from gpu_flows.remote.fetch import Fetched, FetchedFile, fetch
from gpu_flows.remote.tree import Tree, scan_tree
from gpu_flows.remote.upload import Upload, upload_tree

__all__ = ["Fetched", "FetchedFile", "Tree", "Upload", "fetch", "scan_tree", "upload_tree"]
