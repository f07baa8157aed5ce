//! Compiles the C++ side. Without a C++ compiler the crate builds without its entry points, and
//! says so: NIXL then finds no plugin in the library, and everything else of the project works.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(no_cxx)");
    for file in ["cpp/plugin.cpp", "cpp/nixl_abi.h", "cpp/uccl_nixl.h"] {
        println!("cargo::rerun-if-changed={file}");
    }
    let mut build = cc::Build::new();
    build.cpp(true).std("c++20").file("cpp/plugin.cpp").warnings_into_errors(true);
    build.flag("-fvisibility=hidden").flag("-Wno-unused-parameter");
    let compiler = build.try_get_compiler();
    let works = compiler.is_ok_and(|compiler| {
        compiler.to_command().arg("--version").output().is_ok_and(|output| output.status.success())
    });
    if works {
        build.compile("uccl_nixl_cpp");
    } else {
        println!("cargo::rustc-cfg=no_cxx");
        println!(
            "cargo::warning=no C++ compiler (apt-get install g++): the NIXL plugin is built without its entry points"
        );
    }
}
