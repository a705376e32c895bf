"""Token values that stand for content which is no text, such as the placeholders of an image."""

from __future__ import annotations

import hashlib
import operator

import numpy as np
import numpy.typing as npt

__all__ = ["content_tokens"]

_DOMAIN = b"kvpager content tokens 1\0"
_DIGEST_BYTES = 32
# Five values carry 150 bits of the digest, so that two contents agree in all of them by no accident and by no search.
_TOKENS_MIN = 5
_TOKENS_MAX = 2**20
_FIRST_VALUE = 2**30


def content_tokens(digest: bytes, n: int) -> npt.NDArray[np.int32]:
    """Expand a 256-bit digest of some content into ``n`` token values in 2^30..2^31-1.

    Put them where the model has the content's placeholders: equal contents then share KV, and different ones do not.
    The pager never lets a hit end inside such a run, so a few values never stand for the whole digest.

    The values are the low 30 bits of each 4 bytes, little-endian, of SHAKE-256 over the bytes
    ``b"kvpager content tokens 1\\0"``, ``n`` as 8 bytes little-endian, and the digest; 2^30 is added to each.

    >>> content_tokens(bytes(32), 5).tolist()
    [1244887938, 1217314854, 1493572829, 1777731133, 2069010176]
    >>> content_tokens(bytes(range(32)), 6).tolist()
    [1355722764, 1727105772, 1774960695, 1117092943, 1868598465, 1912178922]
    """
    if not isinstance(digest, bytes):
        raise TypeError(f"digest must be bytes, not {type(digest).__name__}")
    if len(digest) != _DIGEST_BYTES:
        raise ValueError(
            f"digest must have {_DIGEST_BYTES} bytes, not {len(digest)}: hash the content, with SHA-256 say"
        )
    n = operator.index(n)
    if not _TOKENS_MIN <= n <= _TOKENS_MAX:
        raise ValueError(f"n must be {_TOKENS_MIN}..{_TOKENS_MAX}, not {n}")
    stream = hashlib.shake_256(_DOMAIN + n.to_bytes(8, "little") + digest).digest(4 * n)
    words = np.frombuffer(stream, dtype="<u4")
    return ((words & (_FIRST_VALUE - 1)) | _FIRST_VALUE).astype(np.int32)
