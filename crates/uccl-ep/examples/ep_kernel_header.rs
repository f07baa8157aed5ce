//! Prints the header that `cargo xtask headers` writes for the kernels.

fn main() {
    print!("{}", uccl_ep::cuda::kernel_header());
}
