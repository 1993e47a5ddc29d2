"""Text before any rule looks at it: the model's view, the view for detection, and the ways back to the original
offsets.
"""

from gateway.safety.text.chat_syntax import DEFAULT_SYNTAX, DEFAULT_TOKENS, ChatSyntax
from gateway.safety.text.normalize import decode, normalize
from gateway.safety.text.skeleton import Skeleton, prototype, skeleton
from gateway.safety.text.smuggled import Smuggled, smuggled
from gateway.safety.text.trail import Normalized
from gateway.safety.text.ucd import UNICODE_VERSION

__all__ = [
    "DEFAULT_SYNTAX",
    "DEFAULT_TOKENS",
    "UNICODE_VERSION",
    "ChatSyntax",
    "Normalized",
    "Skeleton",
    "Smuggled",
    "decode",
    "normalize",
    "prototype",
    "skeleton",
    "smuggled",
]
