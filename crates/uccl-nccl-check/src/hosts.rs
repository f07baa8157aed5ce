//! Two ranks on two pretended hosts: network namespaces with one link between them.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

/// The interface of each host.
pub(crate) const INTERFACE: &str = "eth0";

/// Why namespaces cannot be had here; none if they can.
pub(crate) fn lacking() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("lacks root: two network namespaces");
    }
    for program in ["ip", "nsenter"] {
        let mut asked = Command::new(program);
        asked.arg("-V").stdout(Stdio::null()).stderr(Stdio::null());
        if !asked.status().is_ok_and(|status| status.success()) {
            return Some("lacks ip or nsenter: two network namespaces");
        }
    }
    let mut tried = Command::new("true");
    move_out(&mut tried);
    let works = tried.status().is_ok_and(|status| status.success());
    (!works).then_some("lacks the right to make network namespaces")
}

/// Has a process begin in a network namespace of its own.
pub(crate) fn move_out(command: &mut Command) {
    let unshare = || {
        // SAFETY: takes a number.
        match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(unshare) };
}

/// Joins the namespaces of two processes by a link.
pub(crate) fn join(pids: [u32; 2]) -> Result<()> {
    let far = pids[1].to_string();
    let link = ["link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE];
    within(pids[0], &[&link[..], &["netns", &far]].concat())?;
    for (number, pid) in pids.into_iter().enumerate() {
        let address = format!("10.77.0.{}/24", number + 1);
        within(pid, &["link", "set", "lo", "up"])?;
        within(pid, &["address", "add", &address, "dev", INTERFACE])?;
        within(pid, &["link", "set", INTERFACE, "up"])?;
    }
    Ok(())
}

/// Cuts the link, or mends it.
pub(crate) fn set_link(pid: u32, is_up: bool) -> Result<()> {
    within(pid, &["link", "set", INTERFACE, if is_up { "up" } else { "down" }])
}

/// Runs `ip` in the namespace of a process.
fn within(pid: u32, arguments: &[&str]) -> Result<()> {
    let done = Command::new("nsenter")
        .args(["--net", "--target", &pid.to_string(), "--", "ip"])
        .args(arguments)
        .output()
        .context("nsenter")?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "ip {}: {said}", arguments.join(" "));
    Ok(())
}
