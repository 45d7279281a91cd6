"""Elastic training: a supervisor, its fleet of processes and in-memory snapshots, for runs that survive failures."""

from ... import _names_above

# a command that refuses its arguments needs only modules that import no JAX; `__init__.pyi` has the names
__getattr__ = _names_above.look_up(__name__, _names_above.rooms_of_stub(__name__))
