"""A folder of shards over HTTP, for the machines of a lab: any range, never a byte of another file, nothing outside the folder.

asking.py      what a request asks for: names, a part, conditions; pure
inside.py      a file inside the folder, whatever its links say
places.py      so many connections at a time
answering.py   a connection: request after request, bodies by sendfile
server.py      the address, the threads, their end

A thread per connection on the standard library's http.server: Python handles a request in a fraction of a millisecond, and the
kernel sends its megabytes, without the interpreter's lock and without a copy. For some hundred clients that ask for megabytes at
a time this fills a network. The roads not taken: asyncio would open and read files in threads all the same; a web framework
would be a dependency for two methods; http.server's own SimpleHTTPRequestHandler knows neither ranges nor ETags, follows links
anywhere and guesses types. Who serves the world puts nginx before the folder instead: here is no encryption, no password, and
no limit on what a client may fetch.

An answer is cut off rather than padded where a file shrinks while it is sent, and whoever sends the ETag back (`If-Match`,
`If-Range`) never joins parts of two files. Only a file that is overwritten in place, in the same size and within one tick of the
disk's clock, is not told apart; `convert` puts shards in place by renaming, which gives another inode.
"""

from wdstrain.serving.server import Server

__all__ = ["Server"]
