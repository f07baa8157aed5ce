//! The C header, from the functions that the library has.

use std::{error::Error, path::Path};

use cbindgen::{Builder, Config, DocumentationStyle, Language, Style};

/// The files of the C API, in the order of the header.
const SOURCES: [&str; 9] = [
    "status", "library", "config", "endpoint", "memory", "transfer", "prepared", "address", "notif",
];

const HEADER: &str = "\
/* uccl: tensors between processes and hosts, for C and C++.
 *
 * Made by `cargo xtask headers` from crates/uccl-capi/src/api; do not edit it.
 *
 * All functions may be called from any thread, and none throws. Those that return uccl_status_t return UCCL_OK or the kind
 * of a failure; uccl_last_error then returns this thread's message. Results are written only if UCCL_OK is returned.
 *
 * - Pointers to results and to arguments must not be NULL unless their function says so, and must be valid until it
 *   returns. NULL is refused; the validity of a pointer cannot be checked.
 * - Endpoints, configs and prepared transfers are handles, not addresses: a destroyed one is refused as UCCL_UNKNOWN_ID.
 *   Their creator destroys them, once.
 * - Connections, regions and transfers are numbers of the endpoint that gave them. They are never used twice.
 * - Times are in milliseconds, lengths in bytes. Texts are UTF-8 and end with a NUL. */";

fn main() -> Result<(), Box<dyn Error>> {
    let mut config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Both,
        documentation_style: DocumentationStyle::C99,
        header: Some(HEADER.into()),
        include_guard: Some("UCCL_H".into()),
        no_includes: true,
        sys_includes: ["stddef.h", "stdint.h"].map(String::from).into(),
        usize_is_size_t: true,
        line_length: 120,
        ..Config::default()
    };
    // No function takes these types: a request has an integer in their place.
    config.export.include.extend(["uccl_change_t", "uccl_op_t"].map(String::from));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no repository")?;
    let sources = SOURCES.map(|name| root.join(format!("crates/uccl-capi/src/api/{name}.rs")));
    let builder = sources.into_iter().fold(Builder::new().with_config(config), Builder::with_src);
    builder.generate()?.write(std::io::stdout());
    Ok(())
}
