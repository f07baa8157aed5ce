//! Runs other programs: in the repository's root, with a time limit, as a process group that ends
//! as one.

use std::{
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::{BufRead, BufReader, PipeReader, Read, Write, pipe, stdout},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::tree;

/// Whether this program got a signal to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Time that programs have to end after the first signal.
const GRACE: Duration = Duration::from_secs(5);

/// Interval of the checks of a running program.
const POLL: Duration = Duration::from_millis(20);

/// Groups of programs that run beside this one.
static BESIDE: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The default time limit of a program.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Ends the running program when this one gets a signal to end.
pub(crate) fn forward_interrupts() -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst))
        .context("cannot handle signals")
}

/// Ends a program and its children, with SIGTERM first and SIGKILL later.
fn end(child: &mut Child) -> Result<()> {
    let group = Pid::from_child(child);
    // A group that has ended already is fine.
    let _ = kill_process_group(group, Signal::TERM);
    let end = Instant::now() + GRACE;
    while Instant::now() < end && child.try_wait()?.is_none() {
        thread::sleep(POLL);
    }
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    Ok(())
}

/// Ends all programs that run beside this one.
pub(crate) fn end_beside() {
    for group in BESIDE.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        let _ = kill_process_group(group, Signal::TERM);
    }
}

/// A program that runs beside this one, until [`Self::wait`] or [`end_beside`].
pub(crate) struct BackgroundProgram {
    program: Program,
    child: Child,
}

impl BackgroundProgram {
    /// Waits for the program's end.
    pub(crate) fn wait(self) -> Result<ExitStatus> {
        let group = Pid::from_child(&self.child);
        let status = self.program.wait(self.child);
        BESIDE.lock().unwrap_or_else(PoisonError::into_inner).retain(|pid| *pid != group);
        status
    }
}

/// A program that may have been begun early. The first step that needs its results takes it.
pub(crate) struct EarlyProgram(Mutex<Option<BackgroundProgram>>);

impl EarlyProgram {
    pub(crate) const fn nothing() -> Self {
        Self(Mutex::new(None))
    }

    /// Keeps a started program. The step that needs the results finds a failed start again.
    pub(crate) fn keep(&self, started: Result<BackgroundProgram>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = started.ok();
    }

    /// Begins a command of this program, at a low priority. The step that needs the results repeats
    /// a failed command and reports it.
    pub(crate) fn begin(&self, command: &str, nice: &str) {
        self.keep(begin_command(command, nice));
    }

    /// Waits for the end of the program, if it was begun.
    pub(crate) fn wait(&self) {
        if let Some(begun) = self.take() {
            let _ = begun.wait();
        }
    }

    pub(crate) fn take(&self) -> Option<BackgroundProgram> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Begins a command of this program, with its output in a file of the command's name.
fn begin_command(command: &str, nice: &str) -> Result<BackgroundProgram> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(tree::scratch().join(command).with_extension("log"))?;
    // Cargo may have put another file in the place of this program.
    let this = Path::new("/proc").join(std::process::id().to_string()).join("exe");
    let idle = Program::new("nice").args(["-n".as_ref(), nice.as_ref(), this.as_os_str()]);
    idle.args([command]).beside(log)
}

/// Runs programs, `at_a_time` at once, and shows the output of each after its end, as one block.
/// The output of a running program goes to a file in `logs`, and each line of it to `look` after
/// the end. Returns the results in the order of the ends.
pub(crate) fn run_several(
    programs: Vec<Program>,
    at_a_time: usize,
    logs: &Path,
    mut look: impl FnMut(&str),
) -> Vec<Result<()>> {
    let waiting = Mutex::new(programs.into_iter().enumerate());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let (sender, ended) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some((number, program)) = next() {
                    let log = logs.join(format!("{number}.log"));
                    // The receiver lives until all senders are gone.
                    let _ = sender.send((program.to_string(), program.into_log(&log), log));
                }
            });
        }
        drop(sender);
        let shown = ended.into_iter().map(|(program, result, log)| {
            let said = fs::read(log).unwrap_or_default();
            println!("\n$ {program}");
            let mut out = stdout().lock();
            let _ = out.write_all(&said).and_then(|()| out.flush());
            let said = String::from_utf8_lossy(&said);
            said.lines().for_each(|line| look(&plain(line)));
            result.with_context(|| last_lines(&said))
        });
        shown.collect()
    })
}

/// Number of lines of a failed program's output that its error repeats: pages of other output may
/// follow.
const REPEATED: usize = 40;

fn last_lines(said: &str) -> String {
    let lines: Vec<_> = said.lines().collect();
    let last = &lines[lines.len().saturating_sub(REPEATED)..];
    format!("its last lines:\n  {}\n", last.join("\n  "))
}

/// A program to run.
pub(crate) struct Program {
    command: Command,
    limit: Duration,
}

impl Program {
    /// A program by its name or path.
    pub(crate) fn new(name: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(name);
        command.current_dir(tree::root()).stdin(Stdio::null()).process_group(0);
        Self { command, limit: LIMIT }
    }

    /// The cargo that runs this.
    pub(crate) fn cargo(arguments: &[&str]) -> Self {
        let cargo = Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // In CI nothing is built twice, and incremental compilation takes longer.
        let cargo = if std::env::var_os("CI").is_some() {
            cargo.env("CARGO_INCREMENTAL", "0")
        } else {
            cargo
        };
        cargo.args(arguments)
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    pub(crate) fn in_folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Prints the command and runs it on this terminal.
    pub(crate) fn run(mut self) -> Result<()> {
        println!("$ {self}");
        let child = self.spawn()?;
        let status = self.wait(child)?;
        self.judge(status)
    }

    /// Like [`Self::run`], and passes each line to `look`, without the terminal's colours.
    pub(crate) fn watch(mut self, mut look: impl FnMut(&str)) -> Result<()> {
        println!("$ {self}");
        let lines = self.pipe_output(Echo::Yes)?;
        let child = self.spawn()?;
        // The command's own ends of the pipe would keep it open.
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        let status = self.wait(child);
        // A process that outlived its parent may still hold the pipe.
        while let Ok(line) = lines.recv_timeout(GRACE) {
            look(&line);
        }
        self.judge(status?)
    }

    /// Runs quietly. Returns whether the program succeeded, and its output.
    pub(crate) fn ask(mut self) -> Result<(bool, String)> {
        self.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.spawn()?;
        let stdout = child.stdout.take().map(|pipe| thread::spawn(|| everything(pipe)));
        let stderr = child.stderr.take().map(|pipe| thread::spawn(|| everything(pipe)));
        let status = self.wait(child)?;
        let said = |reader: Option<thread::JoinHandle<String>>| {
            reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
        };
        let (stdout, stderr) = (said(stdout), said(stderr));
        let well = status.success();
        Ok((well, if well || stderr.is_empty() { stdout } else { stderr }))
    }

    /// Runs quietly. Returns the status and the lines of output, even after the time limit.
    pub(crate) fn hear(mut self) -> Result<(Result<ExitStatus>, Vec<String>)> {
        let lines = self.pipe_output(Echo::No)?;
        let child = self.spawn()?;
        self.command.stdout(Stdio::null()).stderr(Stdio::null());
        let status = self.wait(child);
        // A process that outlived its parent may still hold the pipe.
        let said = std::iter::from_fn(|| lines.recv_timeout(GRACE).ok()).collect();
        Ok((status, said))
    }

    /// Whether the program exists and succeeds.
    pub(crate) fn works(self) -> bool {
        self.ask().is_ok_and(|(well, _)| well)
    }

    /// Prints the command and lets it run beside this program, with its output in `log`.
    pub(crate) fn beside(mut self, log: File) -> Result<BackgroundProgram> {
        println!("$ {self} &");
        self.command.stdout(log.try_clone()?).stderr(log);
        let child = self.spawn()?;
        BESIDE.lock().unwrap_or_else(PoisonError::into_inner).push(Pid::from_child(&child));
        Ok(BackgroundProgram { program: self, child })
    }

    /// Prints the command and runs it, with its output in a file.
    fn into_log(self, log: &Path) -> Result<()> {
        let shown = self.to_string();
        match self.beside(File::create(log)?)?.wait()? {
            status if status.success() => Ok(()),
            status => bail!("{shown}: {status}"),
        }
    }

    fn spawn(&mut self) -> Result<Child> {
        self.command.spawn().with_context(|| format!("cannot run {self}"))
    }

    fn wait(&self, mut child: Child) -> Result<ExitStatus> {
        let limit = Instant::now() + self.limit;
        loop {
            if INTERRUPTED.load(Ordering::SeqCst) {
                end_beside();
                end(&mut child)?;
                std::process::exit(130);
            }
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > limit {
                end(&mut child)?;
                bail!("{self} took more than {} s and was ended", self.limit.as_secs_f64());
            }
            thread::sleep(POLL);
        }
    }

    fn judge(&self, status: ExitStatus) -> Result<()> {
        match status.success() {
            true => Ok(()),
            false => bail!("{self}: {status}"),
        }
    }

    fn pipe_output(&mut self, echo: Echo) -> Result<mpsc::Receiver<String>> {
        let (reader, writer) = pipe()?;
        self.command.stdout(writer.try_clone()?).stderr(writer);
        let (lines, receiver) = mpsc::channel();
        thread::spawn(move || copy_lines(reader, &lines, echo));
        Ok(receiver)
    }
}

/// The command as one would type it, shortened.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = Path::new(self.command.get_program());
        let shown = match program.starts_with(tree::root()) {
            true => program.strip_prefix(tree::root()).unwrap_or(program).as_os_str(),
            false => program.file_name().unwrap_or(program.as_os_str()),
        };
        for (name, value) in self.command.get_envs() {
            if let Some(value) = value {
                write!(f, "{}={:?} ", name.to_string_lossy(), value.to_string_lossy())?;
            }
        }
        write!(f, "{}", shown.to_string_lossy())?;
        self.command.get_args().try_for_each(|arg| {
            let arg = arg.to_string_lossy();
            // Dots stand for a script.
            write!(f, " {}", if arg.contains('\n') { "..." } else { &arg })
        })
    }
}

/// Reads a pipe to its end.
fn everything(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    // The bytes before an error are worth having.
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Whether lines are shown on the terminal as they come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Echo {
    No,
    Yes,
}

fn copy_lines(reader: PipeReader, lines: &mpsc::Sender<String>, echo: Echo) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
        if echo == Echo::Yes {
            // A closed terminal is no reason to stop the tests.
            let _ = stdout().lock().write_all(&line);
        }
        let _ = lines.send(plain(&String::from_utf8_lossy(&line)));
        line.clear();
    }
}

/// A line without its end and without escape sequences.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut chars = line.trim_end().chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            chars.by_ref().find(|c| c.is_ascii_alphabetic());
        } else {
            text.push(c);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_taken_off() {
        assert_eq!(plain("\x1b[1;32mok\x1b[0m done\r\n"), "ok done");
        assert_eq!(plain("cut \x1b["), "cut ");
    }

    #[test]
    fn a_command_of_this_program_runs_beside_it() {
        static EARLY: EarlyProgram = EarlyProgram::nothing();
        // A name of the test above, which this program takes for a choice of tests.
        EARLY.begin("colours_are_taken_off", "19");
        EARLY.wait();
        let log = tree::scratch().join("colours_are_taken_off.log");
        let said = fs::read_to_string(&log).expect("it has begun");
        fs::remove_file(log).expect("the file goes");
        assert!(said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended_with_its_children() {
        let sleeper = Program::new("sh").args(["-c", "sleep 600 & echo $!; wait"]);
        let mut sleeping = None;
        let result = sleeper.limit(Duration::from_millis(500)).watch(|pid| {
            sleeping = pid.parse().ok().and_then(Pid::from_raw);
        });
        let error = result.expect_err("it is ended").to_string();
        assert!(error.contains("and was ended"), "{error}");
        let sleeping = sleeping.expect("its child's id");
        // The process that adopts it may take a moment to reap it.
        let gone = || rustix::process::test_kill_process(sleeping).is_err();
        assert!((0..500).any(|_| gone() || {
            thread::sleep(POLL);
            false
        }));
    }

    #[test]
    fn several_run_at_a_time_and_are_told_apart() {
        let logs = std::env::temp_dir().join(format!("xtask-several-{}", std::process::id()));
        fs::create_dir_all(&logs).expect("a folder");
        // Each program ends only after the other has begun.
        let meet = |own: &str, other: &str, status: u8| {
            let script = format!(
                "echo {own} begins; touch {own}; until [ -e {other} ]; do sleep 0.01; done; \
                 echo {own} ends; exit {status}"
            );
            Program::new("sh").args(["-c", &script]).in_folder(&logs)
        };
        let mut seen = Vec::new();
        let programs = vec![meet("a", "b", 0), meet("b", "a", 3)];
        let results = run_several(programs, 2, &logs, |line| seen.push(line.to_owned()));
        fs::remove_dir_all(&logs).expect("the folder goes");
        assert!(["a", "b"].contains(&&seen[0][..1]), "{seen:?}");
        assert_eq!(seen[0][..1], seen[1][..1], "{seen:?}");
        assert_eq!(seen[2][..1], seen[3][..1], "{seen:?}");
        let failed: Vec<_> = results.iter().filter_map(|r| r.as_ref().err()).collect();
        let [error] = failed[..] else { panic!("{failed:?}") };
        let error = format!("{error:#}");
        assert!(error.contains("exit status: 3") && error.contains("\n  b ends\n"), "{error}");
    }

    #[test]
    fn a_program_that_took_too_long_is_heard() {
        let sleeper = Program::new("sh").args(["-c", "echo one; echo two >&2; sleep 600"]);
        let (status, said) = sleeper.limit(Duration::from_millis(500)).hear().expect("it starts");
        assert!(status.is_err_and(|e| e.to_string().contains("and was ended")));
        assert_eq!(said, ["one", "two"]);
    }

    #[test]
    fn lines_are_seen_and_failure_is_told() {
        let mut seen = Vec::new();
        let program = Program::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]);
        let error = program.watch(|line| seen.push(line.to_owned())).expect_err("it fails");
        assert_eq!(seen, ["one", "two"]);
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }
}
