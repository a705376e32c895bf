//! Memory that belongs to Python: the only file with `unsafe`.
//!
//! A view is acquired before the pager's lock is taken, because asking an object for its buffer may run Python code.
//! The slice is formed under the lock, while this thread is attached to the interpreter, and is gone before the
//! thread detaches. A caller who lets another thread write into a prompt during the call has a race of his own, as
//! with every consumer of buffers.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

/// The values of a contiguous buffer, for no longer than this thread stays attached; None if it is not contiguous.
pub fn values<'a, T: Element>(buffer: &'a PyBuffer<T>, _py: Python<'a>) -> Option<&'a [T]> {
    if buffer.item_count() == 0 {
        return Some(&[]);
    }
    // SAFETY: `PyBuffer<T>` has checked item size, format and alignment, and `as_slice_ptr` that the buffer is
    // contiguous; T is a plain integer, for which every bit pattern is valid. The buffer's owner may neither move nor
    // free the memory before `buffer` is dropped, which the slice does not outlive. Nor does it outlive this thread's
    // attachment (`_py`), so that no other Python code runs while it exists.
    buffer.as_slice_ptr().map(|slice| unsafe { slice.as_ref() })
}
