//! The terminal, the keyboard, the daemon: everything of `top` that waits.

use super::draw::{Palette, draw};
use super::state::{Do, Top};
use super::{Options, TopError};
use crate::control::{self, Command};
use crate::error_chain;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde_json::Value;
use std::io::IsTerminal;
use std::time::Instant;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// What is waited for.
enum Input {
    Status(Result<Value, String>),
    Terminal(std::io::Result<Event>),
}

/// Shows the view until the user or a signal ends it, and leaves the terminal as it was.
///
/// # Errors
/// See [`TopError`].
pub async fn run(options: Options) -> Result<(), TopError> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    // Before the screen is taken over, so that the error of a daemon that is not there can be read.
    let first = control::ask(&options.control, &Command::Status)?;
    let mut signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()]
        .map(|kind| signal(kind).map_err(TopError::Os));
    let [terminate, interrupt, hangup] = &mut signals;
    let (Ok(terminate), Ok(interrupt), Ok(hangup)) = (terminate, interrupt, hangup) else {
        return signals.into_iter().find_map(Result::err).map_or(Ok(()), Err);
    };
    let (inputs, mut input) = mpsc::channel(16);
    let mut top = Top::new(options.sort.as_deref());
    let started = Instant::now();
    top.update(&first, started.elapsed());

    // From here on a panic restores the terminal, too; whatever way this function ends, `screen` does.
    let mut screen = Screen::new()?;
    ask_daemon(options, inputs.clone())?;
    read_keys(inputs)?;
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let palette = if no_colour { Palette::Plain } else { Palette::Colour };
    loop {
        screen.0.draw(|frame| draw(&top, palette, frame)).map_err(TopError::Terminal)?;
        let input = tokio::select! {
            input = input.recv() => input,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        };
        match input {
            Some(Input::Status(Ok(status))) => top.update(&status, started.elapsed()),
            Some(Input::Status(Err(why))) => top.failed(why),
            Some(Input::Terminal(Ok(Event::Key(key)))) => {
                if meaning(key).is_some_and(|action| !top.act(action)) {
                    return Ok(());
                }
            }
            // Resized, most of all: it is painted anew.
            Some(Input::Terminal(Ok(_))) => {}
            Some(Input::Terminal(Err(error))) => return Err(TopError::Terminal(error)),
            None => return Ok(()),
        }
    }
}

/// The terminal in raw mode, on its other screen.
struct Screen(ratatui::DefaultTerminal);

impl Screen {
    fn new() -> Result<Self, TopError> {
        ratatui::try_init().map(Self).map_err(|error| {
            ratatui::restore();
            TopError::Terminal(error)
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// A thread, so that a daemon that answers late does not hold up the keys. It ends when nobody listens.
fn ask_daemon(options: Options, inputs: mpsc::Sender<Input>) -> Result<(), TopError> {
    let ask = move || {
        loop {
            std::thread::sleep(options.interval);
            let status = control::ask(&options.control, &Command::Status).map_err(|error| error_chain(&error));
            if inputs.blocking_send(Input::Status(status)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("top-status".to_owned()).spawn(ask).map(drop).map_err(TopError::Os)
}

/// A thread that waits for keys; it ends with the process.
fn read_keys(inputs: mpsc::Sender<Input>) -> Result<(), TopError> {
    let read = move || {
        loop {
            let event = event::read();
            let failed = event.is_err();
            if inputs.blocking_send(Input::Terminal(event)).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new().name("top-keys".to_owned()).spawn(read).map(drop).map_err(TopError::Os)
}

fn meaning(key: KeyEvent) -> Option<Do> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    match key.code {
        // In raw mode the terminal makes no signal of it.
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Do::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Do::Quit),
        KeyCode::Up | KeyCode::Char('k') => Some(Do::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Do::Down),
        KeyCode::Left | KeyCode::Char('h') => Some(Do::Left),
        KeyCode::Right | KeyCode::Char('l') => Some(Do::Right),
        KeyCode::Char('r') => Some(Do::Reverse),
        _ => None,
    }
}
