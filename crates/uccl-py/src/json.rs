//! The engine's reports as Python dictionaries.

use pyo3::{
    IntoPyObjectExt,
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyDict, PyList},
};
use serde::Serialize;
use serde_json::Value;

/// All fields of a report, under the engine's names.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    report: &impl Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(report).map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
    convert(py, value)
}

fn convert(py: Python<'_>, value: Value) -> PyResult<Bound<'_, PyAny>> {
    match value {
        Value::Null => Ok(py.None().into_bound(py)),
        Value::Bool(b) => b.into_bound_py_any(py),
        Value::Number(n) => match (n.as_u64(), n.as_i64()) {
            (Some(n), _) => n.into_bound_py_any(py),
            (None, Some(n)) => n.into_bound_py_any(py),
            (None, None) => n.as_f64().into_bound_py_any(py),
        },
        Value::String(s) => s.into_bound_py_any(py),
        Value::Array(items) => {
            let items = items.into_iter().map(|item| convert(py, item));
            Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any())
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (name, value) in fields {
                dict.set_item(name, convert(py, value)?)?;
            }
            Ok(dict.into_any())
        }
    }
}
