//! Arguments that are one integer for each row or position: lists, tuples, integer arrays.

use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

use crate::buffers::copied;
use crate::errors::{shown, token_type_error};

/// Stands for a value that no call accepts.
const OUTSIDE: i32 = i32::MIN;

/// The integers of an argument; what does not fit an int32 is refused.
pub fn checked(argument: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<i32>> {
    integers(argument, name, |value, position| {
        Err(PyValueError::new_err(format!("{name}[{position}] is {}: it does not fit an int32", shown(value))))
    })
}

/// The same, but what does not fit becomes a value that no row accepts: it may belong to a row that is ignored.
pub fn clamped(argument: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<i32>> {
    integers(argument, name, |_, _| Ok(OUTSIDE))
}

fn integers<'py>(
    argument: &Bound<'py, PyAny>,
    name: &str,
    outside: impl Fn(&Bound<'py, PyAny>, usize) -> PyResult<i32>,
) -> PyResult<Vec<i32>> {
    let py = argument.py();
    if let Ok(array) = argument.cast::<PyArray1<i32>>() {
        return copied(array);
    }
    if let Ok(array) = argument.cast::<PyArray1<i64>>() {
        let values = copied(array)?;
        let fits = |(position, value): (usize, i64)| match i32::try_from(value) {
            Ok(value) => Ok(value),
            Err(_) => outside(value.into_pyobject(py)?.as_any(), position),
        };
        return values.into_iter().enumerate().map(fits).collect();
    }
    let items = if let Ok(list) = argument.cast::<PyList>() {
        list.as_sequence().to_tuple()?
    } else if let Ok(tuple) = argument.cast::<PyTuple>() {
        tuple.clone()
    } else {
        let refused = |what: String| token_type_error(py, format!("{name} must be integers, one-dimensional, not {what}"), None, None);
        let array = py.import("numpy")?.call_method1("asarray", (argument,))?;
        let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
        let dimensions: usize = array.getattr("ndim")?.extract()?;
        if dimensions != 1 || !(kind == "i" || kind == "u") {
            return Err(refused(argument.get_type().name()?.to_string()));
        }
        array.call_method0("tolist")?.cast::<PyList>()?.as_sequence().to_tuple()?
    };
    let mut values = Vec::with_capacity(items.len());
    for (position, item) in items.iter_borrowed().enumerate() {
        let mut index = item.to_owned();
        if !index.is_exact_instance_of::<PyInt>() {
            let is_bool = index.is_instance_of::<PyBool>() || index.get_type().name()? == "bool";
            if is_bool || !index.hasattr("__index__")? {
                let message = format!("{name}[{position}] must be an integer, not {}", shown(&index));
                return Err(token_type_error(py, message, Some(position), Some(&index)));
            }
            index = index.call_method0("__index__")?;
        }
        values.push(match index.extract::<i32>() {
            Ok(value) => value,
            Err(_) => outside(&index, position)?,
        });
    }
    Ok(values)
}
