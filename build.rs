//! The shared library's name and its promise to stay loaded: threads may be inside it at any time. (What is installed is
//! linked anew, with symbol versions: xtask/link.)
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libatropos.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
