//! Memory that belongs to Python: the only file with `unsafe`.
//!
//! A view is acquired before the pager's lock is taken, because asking an object for its buffer may run Python code.
//! The slice is formed under the lock, while this thread is attached to the interpreter, and is gone before the
//! thread detaches. A caller who lets another thread write into a prompt during the call has a race of his own, as
//! with every consumer of buffers.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

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

/// Hands the items of a list to `take` for as long as they are ints and nothing else, 0 to 2^63 - 1, and `take` goes on.
/// Answers whether that was the whole list.
///
/// The safe way to read a list that may change is to count references to each item, or to make a tuple of it first:
/// 2 ns a token more.
pub fn each_int(list: &Bound<'_, PyList>, mut take: impl FnMut(i64) -> bool) -> bool {
    for position in 0..list.len() {
        // SAFETY: the list is one, and this thread is attached. It lends its item, or none with an error if it became
        // shorter. The item is used at once: an exact int is converted without a call to Python code, so that the list
        // cannot change, nor the item go, in between.
        let value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), position.cast_signed());
            let is_int = !item.is_null() && ffi::PyLong_CheckExact(item) != 0;
            if is_int { ffi::PyLong_AsLongLong(item) } else { -1 }
        };
        if value < 0 || !take(value) {
            // Nobody waits for the error of a missing item, or of an int that fits no long.
            drop(PyErr::take(list.py()));
            return false;
        }
    }
    true
}
