"""What can be wrong with a profile, as one message."""

from meshscope.errors import MeshscopeError


class TraceError(MeshscopeError):
    """A profile that is damaged, cut short, too large, or of another program than was expected."""
