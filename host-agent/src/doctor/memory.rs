//! The host's memory: huge pages, swap, samepage merging.

use super::{Check, Line, Surroundings, size};
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::Path;

pub(super) fn lines(surroundings: &Surroundings) -> Vec<Line> {
    let mm = surroundings.sys.join("kernel/mm");
    vec![hugetlb(&mm), thp(&mm), swap(&surroundings.proc), ksm(&mm, &surroundings.proc)]
}

/// One pool of `Documentation/admin-guide/mm/hugetlbpage.rst`; all counts are pages of its size.
struct Pool {
    page_bytes: u64,
    total: u64,
    free: u64,
    reserved: u64,
    surplus: u64,
    overcommit: u64,
}

impl Pool {
    fn read(directory: &Path) -> io::Result<Option<Self>> {
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(kib) = name.strip_prefix("hugepages-").and_then(|name| name.strip_suffix("kB")?.parse::<u64>().ok())
        else {
            return Ok(None);
        };
        let count = |name| number(&directory.join(name));
        Ok(Some(Self {
            page_bytes: kib.saturating_mul(1024),
            total: count("nr_hugepages")?,
            free: count("free_hugepages")?,
            reserved: count("resv_hugepages")?,
            surplus: count("surplus_hugepages")?,
            // Sizes that only exist at boot (gigantic ones on some machines) have no such file.
            overcommit: count("nr_overcommit_hugepages").unwrap_or(0),
        }))
    }

    fn json(&self) -> Value {
        json!({
            "page_bytes": self.page_bytes, "total_pages": self.total, "free_pages": self.free,
            "reserved_pages": self.reserved, "surplus_pages": self.surplus, "overcommit_pages": self.overcommit,
        })
    }
}

fn hugetlb(mm: &Path) -> Line {
    let root = mm.join("hugepages");
    let pools = fs::read_dir(&root).and_then(|entries| {
        let mut pools = Vec::new();
        for entry in entries {
            pools.extend(Pool::read(&entry?.path())?);
        }
        pools.sort_by_key(|pool: &Pool| pool.page_bytes);
        Ok(pools)
    });
    let pools = match pools {
        Ok(pools) => pools,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Line::ok(Check::Hugetlb, "the kernel has none; guests on plain memfd need none")
                .figure("pools", json!([]));
        }
        Err(error) => return Line::unreadable(Check::Hugetlb, &root, &error),
    };
    let used: Vec<String> = pools
        .iter()
        .filter(|pool| pool.total > 0 || pool.overcommit > 0)
        .map(|pool| {
            let free = pool.free.saturating_sub(pool.reserved);
            format!(
                "{} pages: {free} of {} free and not reserved, {} more on demand",
                size(pool.page_bytes),
                pool.total,
                pool.overcommit.saturating_sub(pool.surplus)
            )
        })
        .collect();
    let reason =
        if used.is_empty() { "none set aside; guests on plain memfd need none".to_owned() } else { used.join("; ") };
    Line::ok(Check::Hugetlb, reason).figure("pools", pools.iter().map(Pool::json).collect::<Vec<_>>())
}

/// `Documentation/admin-guide/mm/transhuge.rst`. QEMU advises huge pages for guest memory (`qemu_ram_setup_dump` aside,
/// `ram_block_add` calls `madvise(MADV_HUGEPAGE)`), so `advise` is enough.
fn thp(mm: &Path) -> Line {
    let directory = mm.join("transparent_hugepage");
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read_to_string(&path).map_err(|error| (path, error))
    };
    let (enabled, shmem) = match (read("enabled"), read("shmem_enabled")) {
        (Ok(enabled), Ok(shmem)) => (chosen(&enabled), chosen(&shmem)),
        (Err((_, error)), _) if error.kind() == io::ErrorKind::NotFound => {
            return Line::warn(
                Check::Thp,
                "the kernel is built without transparent huge pages: memory is dropped in pages of 4 KiB",
                "works; dropping costs 20 times as much as with huge pages. hugetlb is the other way to have them",
            );
        }
        (Err((path, error)), _) | (_, Err((path, error))) => return Line::unreadable(Check::Thp, &path, &error),
    };
    let line = if matches!(shmem.as_str(), "always" | "within_size" | "advise" | "force") {
        Line::ok(Check::Thp, format!("enabled={enabled}, shmem_enabled={shmem}: guests on memfd get huge pages"))
    } else {
        Line::warn(
            Check::Thp,
            format!(
                "shmem_enabled={shmem}: guests on memfd get pages of 4 KiB, and dropping 2 MiB costs 160 to 300 µs \
                     instead of 7 to 15 µs (private memory: enabled={enabled})"
            ),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; for guests started afterwards",
        )
    };
    line.figure("enabled", enabled).figure("shmem_enabled", shmem)
}

/// The word in brackets.
fn chosen(text: &str) -> String {
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map_or_else(|| text.trim(), |(word, _)| word).to_owned()
}

fn swap(proc: &Path) -> Line {
    let path = proc.join("swaps");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Line::ok(Check::Swap, "the kernel has none").figure("devices", json!([]));
        }
        Err(error) => return Line::unreadable(Check::Swap, &path, &error),
    };
    let mut devices = Vec::new();
    let (mut total, mut used, mut words) = (0_u64, 0_u64, Vec::new());
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, kind, kib, used_kib, priority] = fields[..] else {
            return Line::warn(Check::Swap, format!("cannot understand {line:?} in {}", path.display()), "report this");
        };
        let (Ok(kib), Ok(used_kib)) = (kib.parse::<u64>(), used_kib.parse::<u64>()) else {
            return Line::warn(Check::Swap, format!("cannot understand {line:?} in {}", path.display()), "report this");
        };
        let kind = match kind {
            _ if name.rsplit('/').next().is_some_and(|name| name.starts_with("zram")) => "zram",
            "file" => "file",
            _ => "disk",
        };
        let (bytes, used_bytes) = (kib.saturating_mul(1024), used_kib.saturating_mul(1024));
        total = total.saturating_add(bytes);
        used = used.saturating_add(used_bytes);
        words.push(format!("{name} ({kind}) {} of {}", size(used_bytes), size(bytes)));
        devices.push(json!({
            "path": name, "kind": kind, "size_bytes": bytes, "used_bytes": used_bytes,
            "priority": priority.parse::<i64>().ok(),
        }));
    }
    let reason = if words.is_empty() { "none".to_owned() } else { format!("used: {}", words.join(", ")) };
    Line::ok(Check::Swap, reason).figure("devices", devices).figure("size_bytes", total).figure("used_bytes", used)
}

/// `Documentation/admin-guide/mm/ksm.rst`: only private anonymous memory is merged, so shared guest memory never is.
fn ksm(mm: &Path, proc: &Path) -> Line {
    let root = mm.join("ksm");
    let per_process = proc.join("self/ksm_stat").exists();
    let (run, shared, sharing) =
        match (number(&root.join("run")), number(&root.join("pages_shared")), number(&root.join("pages_sharing"))) {
            (Ok(run), Ok(shared), Ok(sharing)) => (run, shared, sharing),
            (Err(error), ..) if error.kind() == io::ErrorKind::NotFound => {
                return Line::ok(Check::Ksm, "not in this kernel; fpr does not need it").figure("run", Value::Null);
            }
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                return Line::unreadable(Check::Ksm, &root, &error);
            }
        };
    let reason = match run {
        0 => "off".to_owned(),
        1 => format!(
            "on: {sharing} pages merged into {shared}, private memory only; the shared memory that fpr needs is never merged"
        ),
        _ => "switched off, merged pages were taken apart".to_owned(),
    };
    let statistics = if per_process { "figures per process in ksm_stat" } else { "no figures per process (ksm_stat)" };
    Line::ok(Check::Ksm, format!("{reason}; {statistics}"))
        .figure("run", run)
        .figure("shared_pages", shared)
        .figure("sharing_pages", sharing)
        .figure("per_process_ksm_stat", per_process)
}

fn number(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word() {
        assert_eq!(chosen("always within_size [advise] never deny force\n"), "advise");
        assert_eq!(chosen("never\n"), "never");
    }
}
