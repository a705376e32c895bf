//! Tokens as callers have them: lists, tuples, buffers of any integer type. What is not an int32 or uint32 in one
//! piece is converted, and checked, before the pager's lock is taken.

use kvpager_core::Error;
use kvpager_core::ids::{TOKEN_END, Token};
use kvpager_core::memory::with_capacity;
use pyo3::IntoPyObjectExt;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyAttributeError, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyList, PyMemoryView, PySequence, PyString, PyTuple};

use crate::arguments::is_bool;
use crate::buffers::{each_int, values};
use crate::errors::{allocation_error, shown, to_python, token_error, token_message, token_type_error};

/// Tokens of one call.
pub enum Tokens {
    /// Converted, and checked.
    Owned(Vec<Token>),
    /// Read in place; the core checks the values as it copies them.
    Unsigned(PyBuffer<u32>),
    /// As `Unsigned`: a negative value is too large as an unsigned one, and refused for that.
    Signed(PyBuffer<i32>),
}

impl Tokens {
    /// The tokens that an argument holds.
    pub fn from_any(tokens: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(list) = tokens.cast::<PyList>() {
            // One of another type may have a mind of its own about its items.
            return if list.is_exact_instance_of::<PyList>() {
                from_list(list)
            } else {
                from_sequence(list.as_sequence())
            };
        }
        if let Ok(tuple) = tokens.cast::<PyTuple>() {
            return from_tuple(tuple);
        }
        // Some exporters (ctypes) leave strides out, which a memoryview puts in.
        let buffer =
            PyUntypedBuffer::get(tokens).or_else(|_| PyUntypedBuffer::get(PyMemoryView::from(tokens)?.as_any()));
        if let Ok(buffer) = buffer {
            return from_buffer(tokens, buffer);
        }
        // A range, a deque: whatever says that it is a sequence. So do text and a view that was released.
        if let Ok(sequence) = tokens.cast::<PySequence>()
            && !tokens.is_instance_of::<PyString>()
            && !tokens.is_instance_of::<PyMemoryView>()
        {
            return from_sequence(sequence);
        }
        let kind = tokens.get_type().name()?;
        let message = format!("tokens must be a sequence or a buffer of integers, not {kind}");
        Err(token_type_error(tokens.py(), message, None, None))
    }

    /// The core's error in terms of what the caller gave: it has read an int32 and a uint32 alike.
    pub fn explain(&self, py: Python<'_>, error: Error) -> PyErr {
        match (self, error) {
            (Self::Unsigned(_), Error::Token { position, value }) => {
                let shown = value.into_bound_py_any(py).ok();
                token_error(py, token_message(position, &value), Some(position), shown.as_ref())
            }
            (_, error) => to_python(py, error),
        }
    }

    /// Their values, for no longer than this thread stays attached.
    pub fn as_slice<'a>(&'a self, py: Python<'a>) -> &'a [Token] {
        match self {
            Self::Owned(tokens) => tokens,
            Self::Unsigned(buffer) => values(buffer, py).unwrap_or_default(),
            Self::Signed(buffer) => bytemuck::cast_slice(values(buffer, py).unwrap_or_default()),
        }
    }
}

fn from_list(list: &Bound<'_, PyList>) -> PyResult<Tokens> {
    let mut tokens = with_capacity(list.len()).map_err(|error| to_python(list.py(), error))?;
    let are_plain = each_int(list, |value| {
        let token = Token::try_from(value).ok().filter(|&token| token < TOKEN_END);
        tokens.extend(token);
        token.is_some()
    });
    // What is odd in it is found, or converted, in a tuple: that cannot change while an item's `__index__` runs.
    if are_plain { Ok(Tokens::Owned(tokens)) } else { from_sequence(list.as_sequence()) }
}

fn from_sequence(sequence: &Bound<'_, PySequence>) -> PyResult<Tokens> {
    let py = sequence.py();
    let items = sequence.to_tuple().map_err(|error| {
        // Nothing but a lack of memory keeps a list from being copied.
        if error.is_instance_of::<PyMemoryError>(py) { allocation_error(py) } else { error }
    })?;
    from_tuple(&items)
}

fn from_tuple(items: &Bound<'_, PyTuple>) -> PyResult<Tokens> {
    let mut tokens = with_capacity(items.len()).map_err(|error| to_python(items.py(), error))?;
    for (position, item) in items.iter_borrowed().enumerate() {
        tokens.push(match plain_token(&item) {
            Some(token) => token,
            None => odd_token(&item, Some(position))?,
        });
    }
    Ok(Tokens::Owned(tokens))
}

/// One token.
pub fn token(value: &Bound<'_, PyAny>, position: Option<usize>) -> PyResult<Token> {
    plain_token(value).map_or_else(|| odd_token(value, position), Ok)
}

/// A token that is an int and nothing else, in range: the usual case, kept small.
#[inline]
fn plain_token(value: &Bound<'_, PyAny>) -> Option<Token> {
    if !value.is_exact_instance_of::<PyInt>() {
        return None;
    }
    Token::try_from(value.extract::<i64>().ok()?).ok().filter(|&token| token < TOKEN_END)
}

/// What is no plain int in range: an integer of another type, or an error.
#[cold]
fn odd_token(value: &Bound<'_, PyAny>, position: Option<usize>) -> PyResult<Token> {
    let py = value.py();
    let place = position.map_or(String::new(), |position| format!(" at position {position}"));
    let not_integer = || match shown(value) {
        Ok(shown) => {
            token_type_error(py, format!("token{place} must be an integer, not {shown}"), position, Some(value))
        }
        Err(error) => error,
    };
    if value.is_instance_of::<PyFloat>() || is_bool(value)? {
        return Err(not_integer());
    }
    let index = match value.call_method0("__index__") {
        Ok(index) => index,
        Err(error) if error.is_instance_of::<PyAttributeError>(py) || error.is_instance_of::<PyTypeError>(py) => {
            return Err(not_integer());
        }
        // What else the caller's code raises is his to see: a KeyboardInterrupt above all.
        Err(error) => return Err(error),
    };
    if let Some(token) = plain_token(&index) {
        return Ok(token);
    }
    if !index.is_instance_of::<PyInt>() {
        return Err(not_integer());
    }
    let message = format!("token{place} must be 0 to 2147483647, not {}", shown(&index)?);
    Err(token_error(py, message, position, Some(&index)))
}

fn from_buffer(tokens: &Bound<'_, PyAny>, buffer: PyUntypedBuffer) -> PyResult<Tokens> {
    let py = tokens.py();
    let format = buffer.format().to_string_lossy().into_owned();
    // Checked first: PyO3 takes the other byte order for its own.
    let swapped = if cfg!(target_endian = "little") { [">", "!"] } else { ["<", "<"] };
    if buffer.item_size() > 1 && swapped.iter().any(|order| format.starts_with(order)) {
        let message = format!("tokens must have native byte order, not format {format:?}");
        return Err(token_type_error(py, message, None, None));
    }
    if buffer.dimensions() != 1 {
        let message = format!("tokens must have one dimension, not {}", buffer.dimensions());
        return Err(token_type_error(py, message, None, None));
    }
    if !format.ends_with(|code| "bBhHiIlLqQnN".contains(code)) {
        return Err(token_type_error(py, format!("tokens must be integers, not format {format:?}"), None, None));
    }
    if let Some(tokens) = from_native(py, buffer)? {
        return Ok(tokens);
    }
    // Misaligned, or with its byte order spelled out: numpy copies it into plain form.
    let array = py.import("numpy")?.call_method1("asarray", (tokens,))?;
    let plain = array.call_method1("astype", (array.getattr("dtype")?.call_method1("newbyteorder", ("=",))?,))?;
    from_native(py, PyUntypedBuffer::get(&plain)?)?
        .ok_or_else(|| token_type_error(py, format!("tokens cannot be read in format {format:?}"), None, None))
}

/// Aligned integers in native format.
fn from_native(py: Python<'_>, buffer: PyUntypedBuffer) -> PyResult<Option<Tokens>> {
    if buffer.is_c_contiguous() {
        if buffer.as_typed::<i32>().is_ok() {
            return Ok(Some(Tokens::Signed(buffer.into_typed()?)));
        }
        if buffer.as_typed::<u32>().is_ok() {
            return Ok(Some(Tokens::Unsigned(buffer.into_typed()?)));
        }
    }
    macro_rules! convert {
        ($($type:ty),*) => {
            $(if let Ok(typed) = buffer.as_typed::<$type>() {
                return converted(py, typed).map(Some);
            })*
        };
    }
    convert!(i64, i32, u32, u64, i16, u16, i8, u8);
    Ok(None)
}

/// An integer as a 64-bit word: as a token it is in range exactly if the word is below 2^31.
trait Word: Element {
    fn word(self) -> u64;
}

macro_rules! words {
    ($($type:ty as $wide:ty),*) => {
        $(impl Word for $type {
            #[allow(clippy::cast_sign_loss, clippy::cast_lossless, reason = "sign extension is what makes negative values too large")]
            fn word(self) -> u64 {
                self as $wide as u64
            }
        })*
    };
}
words!(i8 as i64, u8 as u64, i16 as i64, u16 as u64, i32 as i64, u32 as u64, i64 as i64, u64 as u64);

/// Integers of another width or spacing.
fn converted<T: Word + for<'py> IntoPyObject<'py>>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Tokens> {
    let scattered;
    let values = if let Some(values) = values(buffer, py) {
        values
    } else {
        scattered = buffer.to_vec(py)?;
        &scattered
    };
    let mut tokens = with_capacity(values.len()).map_err(|error| to_python(py, error))?;
    let mut bits = 0;
    tokens.extend(values.iter().map(|value| {
        bits |= value.word();
        value.word() as Token
    }));
    if bits < u64::from(TOKEN_END) {
        return Ok(Tokens::Owned(tokens));
    }
    let position = values.iter().position(|value| value.word() >= u64::from(TOKEN_END)).unwrap_or(0);
    let value = values[position].into_bound_py_any(py)?;
    Err(token_error(py, token_message(position, &value), Some(position), Some(&value)))
}
