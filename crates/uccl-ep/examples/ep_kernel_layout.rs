//! Prints the layout that `cargo xtask kernels` compares with the structs of the kernels.

fn main() {
    print!("{}", uccl_ep::cuda::layout_assertions());
}
