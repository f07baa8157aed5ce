//! Gives the library the soname that it is installed under, and keeps it loaded.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-uccl.so");
    // NCCL unloads it with the last communicator. Texts of properties and the handlers of this
    // library's thread-local values must live on.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
