//! Memory that belongs to Python: the only file with `unsafe`.
//!
//! A view is acquired before the pager's lock is taken, because asking an object for its buffer may run Python code.
//! The slice is formed under the lock, while this thread is attached to the interpreter, and is gone before the
//! thread detaches. A caller who lets another thread write into a prompt during the call has a race of his own, as
//! with every consumer of buffers.

use std::ops::Range;

use kvpager_core::Error;
use kvpager_core::batch::{Arrays, Shape};
use kvpager_core::memory::with_capacity;
use kvpager_store::{Rows, RowsMut};
use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArray1, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView, PyTypeMethods};

use crate::errors::to_python;

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

/// A copy of an array's values, in order.
pub fn copied<T: Element + numpy::Element + Copy>(array: &Bound<'_, PyArray1<T>>) -> PyResult<Vec<T>> {
    if array.len() == 0 {
        return Ok(Vec::new());
    }
    if !(array.is_c_contiguous() && array.is_aligned()) {
        return copied(array.call_method0("copy")?.cast()?);
    }
    let mut copy = with_capacity(array.len()).map_err(|error| to_python(array.py(), error))?;
    // SAFETY: numpy gives a pointer to `len` initialised values in one piece, aligned, as just asked; integers are
    // valid in every bit pattern; this thread is attached, so that no other Python code changes or frees them
    // meanwhile, and the slice is gone after this line.
    copy.extend_from_slice(unsafe { std::slice::from_raw_parts(array.data(), array.len()) });
    Ok(copy)
}

/// An array that nobody can write to. (The memory is not the array's own, so that Python cannot change its mind either.)
pub fn read_only(py: Python<'_>, values: Vec<i32>) -> Bound<'_, PyArray1<i32>> {
    let array = PyArray1::from_vec(py, values);
    // SAFETY: the array was just made, and nobody else has it yet. `make_nonwriteable` does the same, at 20 times the
    // cost: it asks first whether anybody else has it.
    unsafe { (*array.as_array_ptr()).fields.flags &= !NPY_ARRAY_WRITEABLE };
    array
}

/// Rows of bytes that a store reads into, or writes from, while other threads run Python.
///
/// A store is given one row at a time, and part of it for no longer than a read of the system and its checksum take.
pub struct ByteRows {
    /// Keeps the memory where it is.
    _buffer: PyBuffer<u8>,
    start: *mut u8,
    num_rows: usize,
    row_bytes: usize,
}

// SAFETY: the pointer is to memory that `_buffer` keeps alive, which belongs to no thread; `PyBuffer` is `Send` itself.
unsafe impl Send for ByteRows {}

impl ByteRows {
    /// The rows of a buffer; None if it is no C-contiguous one of bytes in two dimensions, or must be written and cannot.
    pub fn of(object: &Bound<'_, PyAny>, row_bytes: usize, writes: bool) -> Option<Self> {
        let buffer = PyBuffer::<u8>::get(object).ok()?;
        let &[num_rows, len] = buffer.shape() else { return None };
        if len != row_bytes || !buffer.is_c_contiguous() || (writes && buffer.readonly()) {
            return None;
        }
        Some(Self { start: buffer.buf_ptr().cast(), num_rows, row_bytes, _buffer: buffer })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.num_rows
    }

    /// Where a part of a row is.
    fn at(&self, row: usize, bytes: &Range<usize>) -> *mut u8 {
        assert!(row < self.num_rows && bytes.start <= bytes.end && bytes.end <= self.row_bytes, "a row that is there");
        // SAFETY: the buffer is `num_rows * row_bytes` bytes in one piece, as `of` has asked, and the row is one of them.
        unsafe { self.start.add(row * self.row_bytes + bytes.start) }
    }
}

impl Rows for ByteRows {
    fn copy(&self, row: usize, into: &mut [u8]) {
        let from = self.at(row, &(0..into.len()));
        // SAFETY: so many bytes lie there (`at`), and `into` is the store's own memory. The exporter may not move or free
        // them while the buffer is held. If another thread writes to them meanwhile, the copy is of some moment of each
        // byte; the checksum is made of the copy.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }
}

impl RowsMut for ByteRows {
    fn piece(&mut self, row: usize, bytes: Range<usize>) -> &mut [u8] {
        let start = self.at(row, &bytes);
        // SAFETY: so many bytes lie there (`at`), initialised and writable, as `of` has asked; the exporter may not move or
        // free them while the buffer is held. The slice borrows `self` mutably, so that this call has no other; it is
        // passed to a read of the system, a copy and the checksum, none of which does anything with what it has read
        // before. The caller has lent the rows to the call, as he lends a buffer to `readinto`: if another of his threads
        // writes to them all the same, he gets what he and the disk wrote in some order.
        unsafe { std::slice::from_raw_parts_mut(start, bytes.len()) }
    }
}

/// The arrays of a batch: for each buffer one part, one behind the other.
pub struct BatchArrays {
    pub block_tables: Py<PyArrayDyn<i32>>,
    pub seq_lens: Py<PyArrayDyn<i32>>,
    pub slot_mapping: Py<PyArrayDyn<i64>>,
    pub positions: Py<PyArrayDyn<i32>>,
    pub query_start_loc: Py<PyArrayDyn<i32>>,
    /// The caller's arrays, of which those above are views.
    pub owners: Vec<Owner>,
}

/// An array whose memory the batch uses, and who owns that. numpy lets its holder resize an array (`refcheck=False`) in
/// spite of our views, and so does ctypes (`ctypes.resize`).
pub struct Owner {
    array: Py<PyUntypedArray>,
    memory: (usize, usize),
    exporter: Option<Exporter>,
}

/// A ctypes object, and where its memory was.
struct Exporter {
    object: Py<PyAny>,
    memory: (usize, usize),
}

impl Owner {
    /// The array that owns the memory of this one.
    pub fn of(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut owner = array.clone();
        while let Ok(base) = owner.getattr("base")?.cast_into::<PyUntypedArray>() {
            owner = base.into_any();
        }
        let exporter = exporter(owner.getattr("base")?)?;
        let owner = owner.cast_into::<PyUntypedArray>()?;
        Ok(Self { memory: memory(&owner), array: owner.unbind(), exporter })
    }

    fn is_unchanged(&self, py: Python<'_>) -> bool {
        let is_there = |exporter: &Exporter| exported(exporter.object.bind(py)) == Some(exporter.memory);
        memory(self.array.bind(py)) == self.memory && self.exporter.as_ref().is_none_or(is_there)
    }
}

/// The ctypes object behind an array's memory, and where that is. (What else exports buffers keeps them where they are
/// while somebody uses them; to ask it again might run Python code.)
fn exporter(mut base: Bound<'_, PyAny>) -> PyResult<Option<Exporter>> {
    while let Ok(view) = base.cast::<PyMemoryView>() {
        base = view.getattr("obj")?;
    }
    let is_of_ctypes = |class: Bound<'_, PyAny>| -> PyResult<bool> {
        let module = class.getattr("__module__")?;
        Ok(module.extract::<&str>().is_ok_and(|module| module == "_ctypes"))
    };
    let classes = base.get_type().mro();
    for class in classes {
        if is_of_ctypes(class)? {
            let memory = exported(&base);
            return Ok(memory.map(|memory| Exporter { object: base.unbind(), memory }));
        }
    }
    Ok(None)
}

/// Where an object's buffer is, and how long, in bytes.
fn exported(object: &Bound<'_, PyAny>) -> Option<(usize, usize)> {
    let mut view = ffi::Py_buffer::new();
    // SAFETY: this thread is attached, and `view` is given back at once if it was filled. The object is of ctypes, which
    // runs no Python code to answer.
    unsafe {
        if ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, ffi::PyBUF_SIMPLE) != 0 {
            drop(PyErr::take(object.py()));
            return None;
        }
        let memory = (view.buf as usize, view.len.cast_unsigned());
        ffi::PyBuffer_Release(&raw mut view);
        Some(memory)
    }
}

/// Where an array's values are, and how many.
fn memory(array: &Bound<'_, PyUntypedArray>) -> (usize, usize) {
    // SAFETY: the object is a numpy array for as long as it lives; this reads its header.
    (unsafe { (*array.as_array_ptr()).fields.data } as usize, array.len())
}

impl BatchArrays {
    /// One buffer's parts. They are asked for at each step: whoever has an array may have changed what it is.
    ///
    /// # Errors
    /// `Value` if an array cannot be written as it was when the batch was made, or two overlap.
    pub fn of_buffer<'a>(&'a self, py: Python<'a>, shape: &Shape, buffer: usize) -> Result<Arrays<'a>, Error> {
        if !self.owners.iter().all(|owner| owner.is_unchanged(py)) {
            return Err(Error::Value("an array that the batch was given has been resized since".to_owned()));
        }
        let mut ranges = [(0, 0); 5];
        let (seqs, tokens) = (shape.max_seqs, shape.max_tokens);
        let arrays = Arrays {
            block_tables: part(
                "block_tables",
                &self.block_tables,
                py,
                shape,
                buffer,
                seqs * shape.max_blocks,
                &mut ranges[0],
            )?,
            seq_lens: part("seq_lens", &self.seq_lens, py, shape, buffer, seqs, &mut ranges[1])?,
            slot_mapping: part("slot_mapping", &self.slot_mapping, py, shape, buffer, tokens, &mut ranges[2])?,
            positions: part("positions", &self.positions, py, shape, buffer, tokens, &mut ranges[3])?,
            query_start_loc: part(
                "query_start_loc",
                &self.query_start_loc,
                py,
                shape,
                buffer,
                seqs + 1,
                &mut ranges[4],
            )?,
        };
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].1 > pair[1].0) {
            return Err(Error::Value("two arrays of the batch overlap in memory: give each its own".to_owned()));
        }
        Ok(arrays)
    }
}

/// One buffer's part of an array, and where in memory the whole array lies. Forming the slices is sound once the caller has seen
/// that no two arrays overlap, before it writes to any.
fn part<'a, T: numpy::Element>(
    name: &str,
    array: &'a Py<PyArrayDyn<T>>,
    py: Python<'a>,
    shape: &Shape,
    buffer: usize,
    len: usize,
    range: &mut (usize, usize),
) -> Result<&'a mut [T], Error> {
    let array = array.bind(py);
    // SAFETY: the object is a numpy array for as long as it lives; this reads its header.
    let is_writeable = unsafe { (*array.as_array_ptr()).fields.flags & NPY_ARRAY_WRITEABLE != 0 };
    let is_typed = array.dtype().is_equiv_to(&T::get_dtype(py));
    if !is_typed
        || array.len() != len * shape.buffers
        || !array.is_c_contiguous()
        || !array.is_aligned()
        || !is_writeable
    {
        return Err(Error::Value(format!(
            "{name} must stay what it was when the batch was made: {} {}, C-contiguous, aligned, writeable",
            len * shape.buffers,
            T::get_dtype(py)
        )));
    }
    let start = array.data() as usize;
    *range = (start, start + array.len() * size_of::<T>());
    // SAFETY: the array has `buffers * len` aligned values of T in one piece and may be written, as just asked; T is an
    // integer, valid in every bit pattern. `self` keeps the array alive; its memory is neither moved nor freed while
    // this thread is attached and runs no Python code, and the slice does not outlive that (`py`). No other slice of
    // this memory exists: what callers pass as arguments is copied first, and `of_buffer` refuses overlapping parts.
    Ok(unsafe { std::slice::from_raw_parts_mut(array.data().add(buffer * len), len) })
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
