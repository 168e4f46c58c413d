// Requests to the node, from the page and from its reader. The key goes in a field, never in a URL.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function answerOf(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, credentials: 'omit', cache: 'no-store' });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.error?.message ?? `the node answered with status ${answer.status}`);
}
