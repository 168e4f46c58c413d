// What a pane shows, as a file: JSON as it came, or CSV of its rows.

export function saveJson(name, value) {
  save(`${name}.json`, 'application/json', JSON.stringify(value, null, 2));
}

export function saveCsv(name, rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const lines = [columns, ...rows.map((row) => columns.map((column) => row[column]))];
  save(`${name}.csv`, 'text/csv', lines.map((line) => line.map(cell).join(',')).join('\r\n'));
}

// RFC 4180; what a spreadsheet would compute gets an apostrophe.
export function cell(value) {
  if (value === null || value === undefined) return '';
  const text = typeof value === 'object' ? JSON.stringify(value) : String(value);
  const safe = typeof value !== 'number' && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function save(name, kind, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
