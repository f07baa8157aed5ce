//! Prints the required layouts of the kernels' structs, in C++, for `cargo xtask kernels --check`.

fn main() {
    print!("{}", uccl_device::cuda::gather::layout_assertions());
}
