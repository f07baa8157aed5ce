//! Prints what the kernels' structs must be, in C++, for `cargo xtask kernels --check`.

fn main() {
    print!("{}", uccl_device::cuda::gather::layout_assertions());
}
