//! The table of settings in docs/settings.md, from the lists of the engine and of expert
//! parallelism.

fn main() {
    let of_engine = uccl_p2p::Config::settings().iter().map(|setting| {
        let twins: Vec<_> = setting.twins().iter().map(|name| format!("`{name}`")).collect();
        let also =
            if twins.is_empty() { String::new() } else { format!("; also {}", twins.join(", ")) };
        (setting.name, setting.default, format!("{}{also}", setting.doc))
    });
    let of_ep = uccl_ep::settings::Settings::table()
        .map(|setting| (setting.name, setting.default, setting.doc.to_owned()));
    let mut settings: Vec<_> = of_engine.chain(of_ep).collect();
    settings.sort_unstable();
    println!("| variable | default | what it does |");
    println!("| --- | --- | --- |");
    for (name, default, doc) in settings {
        println!("| `{name}` | {default} | {doc} |");
    }
}
