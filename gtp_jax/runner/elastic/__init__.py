"""A run that goes on when a device or a process fails: a supervisor, its fleet of processes, snapshots in memory."""

from ._events import read_events as read_events
from ._events import table as table
from ._options import GROUP as GROUP
from ._options import ElasticOptions as ElasticOptions
from ._picture import draw_timeline as draw_timeline
from ._requests import ask_to_rejoin as ask_to_rejoin
from ._supervisor import supervise as supervise
