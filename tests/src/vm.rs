//! A stock Linux guest in a stock QEMU.
//!
//! Called by tests and benchmarks. A [`Vm`] owns its QEMU and kills it, by its own pid, when it is dropped; the kernel does the same when the
//! thread that booted it ends. The guest's console goes to a file whose end is part of every error.

use std::fmt;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tempfile::TempDir;

use crate::accel::Accelerator;
use crate::environment::Environment;
use crate::host_memory::HostMemory;
use crate::packages::Kernel;
use crate::process::OwnedChild;
use crate::qemu::{GENERIC_DEVICE, Qemu};
use crate::qmp::Qmp;
use crate::shell::{Job, Output, Shell};
use crate::units::{GIB, MIB};
use crate::{poll, sys};

/// A TCG guest boots in about 4 s on an idle machine; this is for a busy one.
const BOOT_DEADLINE: Duration = Duration::from_secs(180);
/// For commands in the guest that say nothing else.
const COMMAND_DEADLINE: Duration = Duration::from_secs(120);

/// Warnings and worse from the first moment on; a panic ends QEMU (with `-no-reboot`). On a busy host a translated guest's timer ticks come
/// too late for the check of the IO-APIC's timer, which then panics; under KVM the kernel leaves the check out by itself.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 earlyprintk=ttyS0 loglevel=5 panic=-1 no_timer_check";

/// What the kernel prints when memory management goes wrong: a page that cannot be offlined is dumped (mm/debug.c), the OOM killer runs
/// (mm/oom_kill.c), an allocation fails (mm/page_alloc.c), something hangs (kernel/hung_task.c, kernel/watchdog.c, kernel/rcu/tree_stall.h)
/// or a kernel assertion fails.
const TROUBLE: [&str; 11] = [
    "page dumped because",
    "unmovable page",
    "Out of memory",
    "oom-kill",
    "page allocation failure",
    "blocked for more than",
    "lockup",
    "detected stall",
    "BUG:",
    "WARNING:",
    "Kernel panic",
];

/// A VM has one balloon at most; this is its name at QEMU, and that of its chardev.
const BALLOON: &str = "balloon";
/// Where it is plugged: devices in QEMU's root complex itself cannot be unplugged.
const BALLOON_PORT: &str = "balloon-port";
/// What the generic device must be told of a balloon: its device ID, its queues (inflate, deflate, statistics, reporting) and the size of
/// `struct virtio_balloon_config` (virtio 1.2, 5.5).
const BALLOON_PROPERTIES: [(&str, u32); 3] = [("virtio-id", 5), ("num_vqs", 4), ("config_size", 16)];
/// A guest takes 5 s to let go of a device (the blinking attention button of PCI Express).
const UNPLUG_DEADLINE: Duration = Duration::from_secs(120);

/// How often a boot that died of a [`TranslationRace`] is tried again.
const TRANSLATION_RACES: u32 = 2;

/// The kernel patches its code at run time by way of an int3 that its handler expects (arch/x86/kernel/alternative.c, text_poke_bp_batch).
/// With one translating thread per CPU, QEMU 7.2 now and then (once in about 250 boots of two busy CPUs) lets the other CPU run the int3
/// after the kernel has stopped expecting it. That is QEMU's fault and happens without any device of ours.
#[derive(Debug, thiserror::Error)]
#[error("the guest met a breakpoint of its kernel's own code patching, a race in QEMU's translator")]
struct TranslationRace;

/// Kind of memory the guest runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBackend {
    /// Anonymous memory of QEMU's own, which KSM may merge.
    Anonymous,
    /// A memfd mapped shared, which other processes can drop pages of.
    SharedMemfd,
    /// A memfd mapped privately: what is written to it never reaches the file.
    PrivateMemfd,
    /// A shared memfd of 2 MiB hugetlb pages; the host must have them.
    HugetlbMemfd,
}

/// A device beyond the few that each VM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// QEMU's own virtio-balloon with `free-page-reporting=on`.
    FreePageReporting,
    /// A vhost-user vsock device whose back end listens on this socket.
    VhostUserVsock(PathBuf),
    /// A vhost-user balloon device whose back end listens on this socket. It needs the generic QEMU.
    VhostUserBalloon(PathBuf),
    /// A virtio block device on this file.
    Disk(PathBuf),
}

/// Which QEMU runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuChoice {
    /// The machine's own.
    Stock,
    /// One with a device that takes any vhost-user back end ([`Environment::generic_qemu`]).
    Generic,
}

/// What happens when the guest resets or panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnReset {
    EndQemu,
    Reboot,
}

/// What a VM runs on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Platform<'environment> {
    pub(crate) accelerator: Accelerator,
    pub(crate) qemu: &'environment Qemu,
    pub(crate) kernel: &'environment Kernel,
    pub(crate) initramfs: &'environment Path,
}

/// What to boot.
#[derive(Debug, Clone)]
pub struct VmBuilder {
    qemu: QemuChoice,
    on_reset: OnReset,
    memory: u64,
    vcpus: u32,
    backend: MemoryBackend,
    devices: Vec<Device>,
    kernel_arguments: Vec<String>,
    qemu_arguments: Vec<String>,
    cgroup: Option<PathBuf>,
}

impl VmBuilder {
    /// Starts QEMU in this cgroup, so that everything it ever touches is charged there. `directory` is the cgroup's.
    #[must_use]
    pub fn cgroup(mut self, directory: &Path) -> Self {
        self.cgroup = Some(directory.to_owned());
        self
    }

    /// Guest memory in bytes; 1 GiB unless said.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Number of virtual CPUs; 2 unless said.
    #[must_use]
    pub fn vcpus(mut self, count: u32) -> Self {
        self.vcpus = count;
        self
    }

    /// Kind of memory; a shared memfd unless said.
    #[must_use]
    pub fn backend(mut self, backend: MemoryBackend) -> Self {
        self.backend = backend;
        self
    }

    /// Which QEMU; the machine's own unless said, or unless a device needs the other.
    #[must_use]
    pub fn qemu(mut self, choice: QemuChoice) -> Self {
        self.qemu = choice;
        self
    }

    /// Lets the guest start again after a reset, which otherwise ends QEMU.
    #[must_use]
    pub fn rebooting(mut self) -> Self {
        self.on_reset = OnReset::Reboot;
        self
    }

    /// Adds a device.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        if matches!(device, Device::VhostUserBalloon(_)) {
            self.qemu = QemuChoice::Generic;
        }
        self.devices.push(device);
        self
    }

    /// Adds to the guest's kernel command line.
    #[must_use]
    pub fn kernel_argument(mut self, argument: &str) -> Self {
        self.kernel_arguments.push(argument.to_owned());
        self
    }

    /// Adds words to QEMU's command line, for instance `["-overcommit", "mem-lock=on"]`.
    #[must_use]
    pub fn qemu_arguments(mut self, arguments: &[&str]) -> Self {
        self.qemu_arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// Boots, and returns when the guest takes commands.
    ///
    /// # Errors
    /// The environment cannot be prepared, QEMU refuses, or the guest does not come up; the message holds what QEMU and the console said.
    pub fn boot(self) -> Result<Vm> {
        let environment = Environment::get()?;
        let platform = Platform {
            accelerator: environment.accelerator,
            qemu: match self.qemu {
                QemuChoice::Stock => &environment.packages.qemu,
                QemuChoice::Generic => environment.generic_qemu()?,
            },
            kernel: &environment.packages.kernel,
            initramfs: &environment.initramfs,
        };
        self.boot_despite_races(platform, BOOT_DEADLINE)
    }

    fn boot_despite_races(&self, platform: Platform<'_>, deadline: Duration) -> Result<Vm> {
        for _ in 0..TRANSLATION_RACES {
            match self.boot_on(platform, deadline) {
                Err(error) if error.is::<TranslationRace>() => eprintln!("booting again: {error:#}"),
                other => return other,
            }
        }
        self.boot_on(platform, deadline)
    }

    pub(crate) fn boot_on(&self, platform: Platform<'_>, deadline: Duration) -> Result<Vm> {
        let dir = tempfile::Builder::new().prefix("fpr-vm-").tempdir()?;
        let mut command = self.command(platform, dir.path());
        let stderr = fs::File::create(dir.path().join("stderr"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        if let Some(cgroup) = &self.cgroup {
            let path = cgroup.join("cgroup.procs");
            let procs = fs::File::options().write(true).open(&path).with_context(|| path.display().to_string())?;
            sys::enter_cgroup(&mut command, procs);
        }
        let child = sys::die_with_spawning_thread(&mut command)
            .spawn()
            .with_context(|| platform.qemu.binary.display().to_string())?;
        let log = Log(dir.path().to_owned());
        let mut child = OwnedChild(child);
        // The log is in the directory, so what it says is read before the directory goes.
        let (qmp, shell) = start(&mut child, &log, deadline).with_context(|| log.to_string())?;
        let memory = if self.backend == MemoryBackend::SharedMemfd { Some(HostMemory::of(child.pid())?) } else { None };
        let qemu_version = platform.qemu.version.clone();
        Ok(Vm { child, qemu_version, shell, qmp: Mutex::new(qmp), memory, log, _dir: dir })
    }

    fn command(&self, platform: Platform<'_>, dir: &Path) -> Command {
        let mut qemu = Command::new(&platform.qemu.binary);
        let (kind, memory) = match self.backend {
            MemoryBackend::Anonymous => ("ram", "merge=on"),
            MemoryBackend::SharedMemfd => ("memfd", "share=on"),
            MemoryBackend::PrivateMemfd => ("memfd", "share=off"),
            MemoryBackend::HugetlbMemfd => ("memfd", "share=on,hugetlb=on,hugetlbsize=2M"),
        };
        let kernel = format!("{KERNEL_ARGUMENTS} {}", self.kernel_arguments.join(" "));
        if self.on_reset == OnReset::EndQemu {
            qemu.arg("-no-reboot");
        }
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", platform.accelerator.qemu_argument(), "-cpu", platform.accelerator.qemu_cpu()])
            .args(["-smp", &self.vcpus.to_string(), "-m", &format!("{}M", self.memory / MIB)])
            .args(["-object", &format!("memory-backend-{kind},id=mem,size={}M,{memory}", self.memory / MIB)])
            .args(["-machine", "q35,memory-backend=mem"])
            .arg("-kernel")
            .arg(&platform.kernel.image)
            .arg("-initrd")
            .arg(platform.initramfs)
            .args(["-append", kernel.trim_end()])
            .args([
                "-chardev",
                &format!("file,id=console,path={}", dir.join("console").display()),
                "-serial",
                "chardev:console",
            ])
            .args([
                "-chardev",
                &format!("socket,id=qmp,path={},server=on,wait=off", dir.join("qmp").display()),
                "-mon",
                "chardev=qmp,mode=control",
            ])
            .args(["-chardev", &format!("socket,id=shell,path={},server=on,wait=off", dir.join("shell").display())])
            .args(["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=shell,name=fpr-guest-shell"]);
        for (index, device) in self.devices.iter().enumerate() {
            match device {
                Device::FreePageReporting => qemu.args(["-device", "virtio-balloon-pci,free-page-reporting=on"]),
                Device::VhostUserVsock(socket) => qemu
                    .args(["-chardev", &format!("socket,id=fpr{index},path={}", socket.display())])
                    .args(["-device", &format!("vhost-user-vsock-pci,chardev=fpr{index}")]),
                Device::VhostUserBalloon(socket) => {
                    let properties = BALLOON_PROPERTIES.map(|(name, value)| format!("{name}={value}")).join(",");
                    qemu.args(["-device", &format!("pcie-root-port,id={BALLOON_PORT},chassis=1")])
                        .args(["-chardev", &format!("socket,id={BALLOON},path={}", socket.display())])
                        .arg("-device")
                        .arg(format!("{GENERIC_DEVICE},id={BALLOON},bus={BALLOON_PORT},chardev={BALLOON},{properties}"))
                }
                Device::Disk(path) => qemu
                    .args(["-drive", &format!("if=none,id=disk{index},format=raw,file={}", path.display())])
                    .args(["-device", &format!("virtio-blk-pci,drive=disk{index}")]),
            };
        }
        qemu.args(&self.qemu_arguments);
        qemu
    }
}

/// Connects to QEMU's sockets and waits until the guest takes commands.
fn start(child: &mut OwnedChild, log: &Log, deadline: Duration) -> Result<(Qmp, Shell)> {
    let end = Instant::now() + deadline;
    let mut connect = |name: &str| -> Result<UnixStream> {
        let path = log.0.join(name);
        let connected = poll::until(
            &format!("QEMU's socket {name}"),
            end.saturating_duration_since(Instant::now()),
            || {
                check_alive(child, log)?;
                Ok(UnixStream::connect(&path).ok())
            },
            Option::is_some,
        )?;
        connected.context("no connection")
    };
    let shell = Shell::new(connect("shell")?)?;
    let qmp = Qmp::new(connect("qmp")?)?;
    let left = end.saturating_duration_since(Instant::now());
    poll::until(
        "the guest to take commands",
        left,
        || check_alive(child, log).map(|()| shell.is_ready()),
        |ready| *ready,
    )?;
    Ok((qmp, shell))
}

fn check_alive(child: &mut OwnedChild, log: &Log) -> Result<()> {
    if let Some(status) = child.0.try_wait()? {
        if log.console().contains("Oops: int3") {
            bail!(TranslationRace);
        }
        bail!("QEMU ended ({status})");
    }
    // On a KVM that cannot run the guest QEMU neither ends nor goes on.
    if log.stderr().contains("KVM internal error") {
        bail!("KVM cannot run the guest");
    }
    Ok(())
}

/// What QEMU and the guest's kernel have said.
#[derive(Debug, Clone)]
struct Log(PathBuf);

impl Log {
    fn stderr(&self) -> String {
        fs::read(self.0.join("stderr")).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn console(&self) -> String {
        fs::read(self.0.join("console")).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stderr, console) = (self.stderr(), self.console());
        let tail: Vec<&str> = console.lines().rev().take(15).collect();
        write!(f, "QEMU said {:?}; end of the guest's console:", stderr.trim())?;
        tail.iter().rev().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

/// A running guest.
#[derive(Debug)]
pub struct Vm {
    // Before the directory, so that QEMU is gone when its files are removed.
    child: OwnedChild,
    qemu_version: String,
    shell: Shell,
    qmp: Mutex<Qmp>,
    memory: Option<HostMemory>,
    log: Log,
    _dir: TempDir,
}

impl Vm {
    /// A guest with 1 GiB of shared memory and 2 virtual CPUs, to be changed as needed.
    #[must_use]
    pub fn builder() -> VmBuilder {
        VmBuilder {
            memory: GIB,
            vcpus: 2,
            qemu: QemuChoice::Stock,
            on_reset: OnReset::EndQemu,
            backend: MemoryBackend::SharedMemfd,
            devices: vec![],
            kernel_arguments: vec![],
            qemu_arguments: vec![],
            cgroup: None,
        }
    }

    /// Runs a command line in the guest's shell and returns its output.
    ///
    /// # Errors
    /// It fails, or takes longer than two minutes.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, COMMAND_DEADLINE)
    }

    /// [`Vm::run`] with another deadline.
    ///
    /// # Errors
    /// The command fails, or takes longer than `deadline`.
    pub fn run_within(&self, command: &str, deadline: Duration) -> Result<Output> {
        let output = self.spawn(command)?.wait(deadline).with_context(|| self.log.to_string())?;
        if output.status != 0 {
            bail!("`{command}` failed in the guest with status {}: {}", output.status, output.stdout.trim());
        }
        Ok(output)
    }

    /// Starts a command line in the guest and leaves it running.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn spawn(&self, command: &str) -> Result<Job<'_>> {
        self.shell.spawn(command).with_context(|| self.log.to_string())
    }

    /// A file in the guest, read without starting a process there.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, path: &str) -> Result<String> {
        self.shell.read(path, COMMAND_DEADLINE)
    }

    /// The memory file, which says what the guest costs its host.
    ///
    /// # Errors
    /// The guest does not run on [`MemoryBackend::SharedMemfd`], so no file says it.
    pub fn host_memory(&self) -> Result<&HostMemory> {
        self.memory.as_ref().context("host memory is measured for MemoryBackend::SharedMemfd only")
    }

    /// Resets the machine, as its reset button would, and returns when the guest takes commands again. Everything that ran in it is gone.
    ///
    /// # Errors
    /// The guest does not come up again; was it built with [`VmBuilder::rebooting`]?
    pub fn reset(&self) -> Result<()> {
        self.shell.forget();
        self.qmp().execute("system_reset", json!({}))?;
        poll::until("the guest to take commands again", BOOT_DEADLINE, || Ok(self.shell.is_ready()), |ready| *ready)
            .map(drop)
            .with_context(|| self.log.to_string())
    }

    /// Unplugs the vhost-user balloon device: its back end may go away after that, and not before.
    ///
    /// # Errors
    /// There is none, or the guest does not let go of it.
    pub fn unplug_balloon(&self) -> Result<()> {
        self.qmp().execute("device_del", json!({ "id": BALLOON }))?;
        // It is taken until the guest has let go of the device and QEMU has freed it.
        let free = || Ok(self.qmp().execute("chardev-remove", json!({ "id": BALLOON })).map(drop));
        poll::until("the guest to let go of its balloon", UNPLUG_DEADLINE, free, Result::is_ok).map(drop)
    }

    /// Plugs it again, with a back end that listens on `socket`.
    ///
    /// # Errors
    /// There is one already, or nobody listens.
    pub fn plug_balloon(&self, socket: &Path) -> Result<()> {
        let data = json!({ "server": false, "addr": { "type": "unix", "data": { "path": socket } } });
        let chardev = json!({ "id": BALLOON, "backend": { "type": "socket", "data": data } });
        self.qmp().execute("chardev-add", chardev)?;
        let mut device = json!({ "driver": GENERIC_DEVICE, "id": BALLOON, "bus": BALLOON_PORT, "chardev": BALLOON });
        BALLOON_PROPERTIES.into_iter().for_each(|(name, value)| device[name] = value.into());
        self.qmp().execute("device_add", device).map(drop)
    }

    /// What `qemu --version` says.
    #[must_use]
    pub fn qemu_version(&self) -> &str {
        &self.qemu_version
    }

    /// QEMU's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// QEMU's monitor.
    pub fn qmp(&self) -> MutexGuard<'_, Qmp> {
        self.qmp.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that the guest's kernel has printed to its console: warnings and worse.
    #[must_use]
    pub fn console(&self) -> String {
        self.log.console()
    }

    /// The lines of the console that tell of a page dump, an OOM kill, a stall or a failed assertion. None are expected, ever.
    #[must_use]
    pub fn trouble(&self) -> Vec<String> {
        let console = self.console();
        console.lines().filter(|line| TROUBLE.iter().any(|trouble| line.contains(trouble))).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Boots a program that counts its starts, writes `console` to the guest's console and ends with `status`; the error and the starts.
    fn boot_with(console: &str, status: i32) -> (String, usize) {
        let dir = tempfile::tempdir().unwrap();
        let (program, starts) = (dir.path().join("qemu"), dir.path().join("starts"));
        let says = format!(
            r#"for word; do case $word in file,id=console,path=*) echo '{console}' > "${{word#*path=}}";; esac; done"#
        );
        let count = format!("echo >> {}", starts.display());
        fs::write(&program, format!("#!/bin/sh\n{count}\n{says}\necho broken >&2\nexit {status}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let nowhere = PathBuf::from("none");
        let kernel = Kernel { image: nowhere.clone(), release: String::new(), modules: nowhere.clone() };
        let qemu = Qemu { binary: program, version: String::new() };
        let platform = Platform { accelerator: Accelerator::Tcg, qemu: &qemu, kernel: &kernel, initramfs: &nowhere };
        let booted = Vm::builder().boot_despite_races(platform, Duration::from_secs(30));
        (format!("{:#}", booted.unwrap_err()), fs::read_to_string(starts).unwrap().lines().count())
    }

    #[test]
    fn a_failed_boot_says_what_qemu_and_the_guest_said() {
        let (error, starts) = boot_with("Kernel panic", 3);
        for word in ["broken", "  | Kernel panic", "exit status: 3"] {
            assert!(error.contains(word), "{error:?} lacks {word:?}");
        }
        assert_eq!(starts, 1);
    }

    #[test]
    fn only_a_race_in_the_translator_is_booted_again() {
        let (error, starts) = boot_with("[    8.891268] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI", 0);
        assert!(error.contains("a race in QEMU"), "{error}");
        assert_eq!(starts, 3);
    }
}
