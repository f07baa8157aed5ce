//! The README's table of settings, from those that the engine knows.

fn main() {
    println!("| variable | default | what it does |");
    println!("| --- | --- | --- |");
    for setting in uccl_p2p::Config::settings() {
        println!("| `{}` | {} | {} |", setting.name, setting.default, setting.doc);
    }
}
