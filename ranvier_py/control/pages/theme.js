// Light or dark: as the system has it, unless somebody chose one.
import { change } from './state.js';

const NAMES = ['auto', 'light', 'dark'];

export function themeName() {
  return localStorage.getItem('ranvier-theme') ?? 'auto';
}

export function isDark() {
  const name = themeName();
  return name === 'dark' || (name === 'auto' && matchMedia('(prefers-color-scheme: dark)').matches);
}

export function useTheme() {
  const name = themeName();
  if (name === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

export function nextTheme() {
  localStorage.setItem('ranvier-theme', NAMES[(NAMES.indexOf(themeName()) + 1) % NAMES.length]);
  useTheme();
  change({});
}

// A colour of the style sheet, for what is drawn on a canvas.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
