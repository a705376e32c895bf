//! Arguments of a batch: a number for each row or position, -1 for none. As tokens otherwise: lists, tuples, sequences,
//! integer buffers of one dimension.

use kvpager_core::memory::with_capacity;
use numpy::PyArray1;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyMemoryView, PySequence, PyString, PyTuple};

use crate::arguments::is_bool;
use crate::buffers::{copied, each_int};
use crate::errors::{shown, to_python, token_error, token_type_error};

/// The numbers of an argument, -1 to 2^31 - 1 each.
pub fn numbers(argument: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<i32>> {
    if let Ok(array) = argument.cast::<PyArray1<i32>>() {
        let values = copied(array)?;
        // The signs of all at once, but for those of -1: a loop without a way out.
        let signs = values.iter().fold(0, |signs, &value| signs | (value & value.wrapping_add(1)));
        if signs >= 0 {
            return Ok(values);
        }
        let position = values.iter().position(|&value| value < -1);
        let value = position.map_or(signs, |at| values[at]);
        return Err(outside(value.into_pyobject(argument.py())?.as_any(), position, name)?);
    }
    if let Ok(array) = argument.cast::<PyArray1<i64>>() {
        let values = copied(array)?;
        let mut numbers = room(argument.py(), values.len())?;
        for (position, value) in values.into_iter().enumerate() {
            match i32::try_from(value) {
                Ok(number) if number >= -1 => numbers.push(number),
                _ => return Err(outside(value.into_pyobject(argument.py())?.as_any(), Some(position), name)?),
            }
        }
        return Ok(numbers);
    }
    if let Ok(list) = argument.cast_exact::<PyList>() {
        let mut numbers = room(argument.py(), list.len())?;
        let are_plain = each_int(list, |value| {
            let number = i32::try_from(value).ok();
            numbers.extend(number);
            number.is_some()
        });
        if are_plain {
            return Ok(numbers);
        }
    }
    let items = items(argument, name)?;
    let mut numbers = room(argument.py(), items.len())?;
    for (position, item) in items.iter_borrowed().enumerate() {
        numbers.push(number(&item, name, Some(position))?);
    }
    Ok(numbers)
}

fn room(py: Python<'_>, count: usize) -> PyResult<Vec<i32>> {
    with_capacity(count).map_err(|error| to_python(py, error))
}

/// One number, -1 to 2^31 - 1.
pub fn number(value: &Bound<'_, PyAny>, name: &str, position: Option<usize>) -> PyResult<i32> {
    let py = value.py();
    let mut index = value.clone();
    if !value.is_exact_instance_of::<PyInt>() {
        let refused = || -> PyResult<PyErr> {
            let message = format!("{name}{} must be an integer, not {}", place(position), shown(value)?);
            Ok(token_type_error(py, message, position, Some(value)))
        };
        if is_bool(value)? || !value.hasattr("__index__")? {
            return Err(refused()?);
        }
        index = match value.call_method0("__index__") {
            Ok(index) if index.is_instance_of::<PyInt>() => index,
            Ok(_) => return Err(refused()?),
            // An array has an __index__, and finds out in the call that it has more than one value.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => return Err(refused()?),
            Err(error) => return Err(error),
        };
    }
    match index.extract::<i32>() {
        Ok(number) if number >= -1 => Ok(number),
        _ => Err(outside(&index, position, name)?),
    }
}

/// The items of what is no array of the usual kind.
fn items<'py>(argument: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
    let py = argument.py();
    let refused = |what: &str| Err(token_type_error(py, format!("{name} must be integers, not {what}"), None, None));
    if let Ok(list) = argument.cast::<PyList>() {
        return list.as_sequence().to_tuple();
    }
    if let Ok(tuple) = argument.cast::<PyTuple>() {
        return Ok(tuple.clone());
    }
    let Ok(view) = PyMemoryView::from(argument) else {
        if let Ok(sequence) = argument.cast::<PySequence>()
            && !argument.is_instance_of::<PyString>()
        {
            return sequence.to_tuple();
        }
        return refused(&argument.get_type().name()?.to_cow()?);
    };
    let array = py.import("numpy")?.call_method1("asarray", (view,))?;
    let data_type = array.getattr("dtype")?;
    let kind: String = data_type.getattr("kind")?.extract()?;
    if !matches!(kind.as_str(), "i" | "u") || !data_type.getattr("isnative")?.is_truthy()? {
        return refused(&format!("a buffer of {data_type}"));
    }
    if array.getattr("ndim")?.extract::<usize>()? != 1 {
        return refused("a buffer of more or fewer than one dimension");
    }
    array.call_method0("tolist")?.cast::<PyList>()?.as_sequence().to_tuple()
}

fn outside(value: &Bound<'_, PyAny>, position: Option<usize>, name: &str) -> PyResult<PyErr> {
    let message = format!("{name}{} must be -1 to 2147483647, not {}", place(position), shown(value)?);
    Ok(token_error(value.py(), message, position, Some(value)))
}

fn place(position: Option<usize>) -> String {
    position.map_or(String::new(), |position| format!(" at position {position}"))
}
