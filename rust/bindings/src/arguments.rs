//! Integers and other arguments whose errors should speak for themselves.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::errors::{config_error, shown};

/// An argument as given, or nothing where a default stands in. (With `Option`, None itself would be taken for the
/// default.)
pub struct Given<'py>(Option<Bound<'py, PyAny>>);

impl Given<'_> {
    /// The default stands in.
    pub const NOTHING: Self = Self(None);
}

impl<'a, 'py> FromPyObject<'a, 'py> for Given<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(Some(object.to_owned())))
    }
}

impl<'py> Given<'py> {
    /// The argument, if there is one.
    pub fn get(&self) -> Option<&Bound<'py, PyAny>> {
        self.0.as_ref()
    }

    /// A position or a count: an integer that is not negative.
    pub fn position(&self, name: &str, default: usize) -> PyResult<usize> {
        let Some(value) = self.get() else { return Ok(default) };
        integer(value, name)?.ok_or_else(|| {
            PyValueError::new_err(format!("{name} is {}: it must be 0 or more, and a position", shown(value)))
        })
    }

    /// A setting: what does not fit its type is outside every limit.
    pub fn setting<T>(&self, py: Python<'py>, name: &str, default: T) -> PyResult<T>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let Some(value) = self.get() else { return Ok(default) };
        integer(value, name)?.ok_or_else(|| config_error(py, format!("{name} is {}, outside its limits", shown(value))))
    }
}

/// The value of anything that stands for an integer and is no bool; None if it does not fit.
fn integer<'py, T: for<'a> FromPyObject<'a, 'py>>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<T>> {
    let mut index = value.clone();
    if !value.is_instance_of::<PyBool>() && value.hasattr("__index__")? {
        index = value.call_method0("__index__")?;
        // One that answers with text, say, is no integer out of range, but none at all.
        if index.is_instance_of::<PyInt>() {
            return Ok(index.extract().ok());
        }
    }
    Err(PyTypeError::new_err(format!("{name} must be an integer, not {}", index.get_type().name()?)))
}
