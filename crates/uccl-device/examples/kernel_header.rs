//! Prints the header that `cargo xtask headers` writes for the kernels that copy.

fn main() {
    print!("{}", uccl_device::cuda::gather::kernel_header());
}
