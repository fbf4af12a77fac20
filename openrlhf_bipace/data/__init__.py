"""What the environments' data are, whether they are here and whole, and prompt datasets made of them.

Nothing is ever downloaded: `SOURCES` says where each environment's data come from and how to get them.
To add an environment's data: an entry in `sources.py` with a function that checks them.
"""

from openrlhf_bipace.data.sources import SOURCES, Check, Source, folder_of, verify
from openrlhf_bipace.data.tasks import read_tasks, write_tasks

__all__ = ["SOURCES", "Check", "Source", "folder_of", "read_tasks", "verify", "write_tasks"]
