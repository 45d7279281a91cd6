"""A training run: its configuration, directory, loop, log and report, and the supervision of its processes."""

from ... import _names_above

# a command that refuses its arguments needs only modules that import no JAX; `__init__.pyi` has the names
__getattr__ = _names_above.look_up(__name__, _names_above.rooms_of_stub(__name__))
