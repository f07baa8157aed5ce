//! The table of settings in docs/settings.md, from the engine's own list.

fn main() {
    println!("| variable | default | what it does |");
    println!("| --- | --- | --- |");
    for setting in uccl_p2p::Config::settings() {
        let twins: Vec<_> = setting.twins().iter().map(|name| format!("`{name}`")).collect();
        let also =
            if twins.is_empty() { String::new() } else { format!("; also {}", twins.join(", ")) };
        println!("| `{}` | {} | {}{also} |", setting.name, setting.default, setting.doc);
    }
}
