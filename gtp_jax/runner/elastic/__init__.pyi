"""Elastic training: a supervisor, its fleet of processes and in-memory snapshots, for runs that survive failures."""

from ._events import read_events as read_events
from ._events import table as table
from ._options import GROUP as GROUP
from ._options import ElasticOptions as ElasticOptions
from ._picture import draw_timeline as draw_timeline
from ._requests import ask_to_rejoin as ask_to_rejoin
from ._supervisor import supervise as supervise
